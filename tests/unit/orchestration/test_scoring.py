"""A reward that fails costs its sample and nothing else; every sample is accounted for."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict

import numpy as np
import pytest

from orchestration.scoring import RewardScorer, drop_lone_samples
from tests.helpers.samples import ListTask, make_trajectory


def test_every_outcome_is_counted() -> None:
    rewards = {
        0: 1.0,
        1: KeyError("no answer"),
        2: math.nan,
        3: math.inf,
        4: "good",
        5: None,
        6: 0,
        7: np.float32(0.5),
        8: SystemExit(0),
    }
    trajectories = [make_trajectory(sample_index=i, reward=None) for i in rewards]
    trajectories += [make_trajectory("aborted", finish_reason="abort", reward=None)]
    trajectories[6] = make_trajectory(sample_index=6, finish_reason="length", reward=None)

    kept, counts = RewardScorer(ListTask(rewards)).score(trajectories)

    assert [(t.sample_index, t.reward) for t in kept] == [(0, 1.0), (6, 0.0), (7, 0.5)]
    assert asdict(counts) == {
        "requested": 10,
        "scored": 3,
        "dropped_reward_error": 2,
        "dropped_reward_nan": 4,
        "aborted": 1,
        "truncated": 1,
    }
    assert counts.dropped == 7


def test_order_does_not_depend_on_which_sample_finished_first() -> None:
    order = [("b", 1), ("a", 1), ("b", 0), ("a", 0)]
    kept, _ = RewardScorer(ListTask({0: 0.0, 1: 1.0})).score([make_trajectory(*key) for key in order])
    assert [(t.group_id, t.sample_index) for t in kept] == sorted(order)


def test_first_failure_of_each_kind_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    scorer = RewardScorer(ListTask({0: KeyError("k"), 1: KeyError("k"), 2: ZeroDivisionError("z"), 3: math.nan}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scorer.score([make_trajectory(sample_index=i) for i in range(4)])
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False]
    assert [kind in caplog.text for kind in ("KeyError", "ZeroDivisionError", "got nan")] == [True] * 3


def test_lone_samples_are_dropped() -> None:
    trajectories = [make_trajectory("pair", 0), make_trajectory("lone", 0), make_trajectory("pair", 1)]
    kept, dropped = drop_lone_samples(trajectories)
    assert [t.group_id for t in kept] == ["pair", "pair"]
    assert dropped == 1
