"""A real engine's log-probabilities against HF under the recorded mask, for every policy and kind of model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kv_policies.config import DenseConfig, PolicyConfig, RandomConfig, SnapKVConfig, StreamingLLMConfig
from orchestration.contracts import Trajectory
from tests.helpers.reference import load_reference, max_delta, replay, replay_dense
from tests.helpers.rollout import TOLERANCE, prompt_groups, rollout_engine
from tests.helpers.wrong_masks import MISTAKES, one_head_for_all, one_layer_for_all

BUDGET = 32
LENGTHS = (1, 2, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 2, 100, 230)


@dataclass(frozen=True)
class Case:
    name: str
    policy: PolicyConfig
    model: dict[str, Any]
    temperature: float = 1.0
    rollout: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("qwen3-gqa-snapkv", SnapKVConfig(budget_tokens=BUDGET, window_tokens=8), {"num_kv_heads": 2}),
    Case(
        "llama-mha-tied-streaming",
        StreamingLLMConfig(budget_tokens=BUDGET),
        {"architecture": "llama", "num_kv_heads": 4, "tied": True},
        temperature=0.7,
    ),
    Case(
        "llama-gqa-random",
        RandomConfig(budget_tokens=BUDGET),
        {"architecture": "llama", "num_kv_heads": 2},
        temperature=0.7,
    ),
    Case(
        # 7-token chunks: the window of 24 queries straddles four of them
        "qwen3-mha-tied-snapkv-chunked",
        SnapKVConfig(budget_tokens=BUDGET, window_tokens=24, pool_kernel=3),
        {"num_kv_heads": 4, "tied": True},
        rollout={"max_num_batched_tokens": 7, "max_num_seqs": 4},
    ),
    Case("qwen3-gqa-dense", DenseConfig(), {"num_kv_heads": 2}, temperature=0.7),
)


@dataclass
class Run:
    case: Case
    model: Any
    trajectories: list[Trajectory]
    stats: Any


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def run(request, tiny_model) -> Run:
    case: Case = request.param
    path = tiny_model(tokenizer=True, **case.model)
    with rollout_engine(path, case.policy, temperature=case.temperature, **case.rollout) as engine:
        trajectories = list(engine.generate(prompt_groups(LENGTHS)))
        return Run(case, load_reference(path), trajectories, engine.stats())


def test_masked_replay_is_exact(run: Run) -> None:
    assert len(run.trajectories) == 2 * len(LENGTHS)
    for trajectory in run.trajectories:
        delta = max_delta(trajectory, replay(run.model, trajectory))
        assert delta <= TOLERANCE, f"{trajectory.group_id}: {delta}"


def test_evicts_what_the_policy_says(run: Run) -> None:
    for trajectory in run.trajectories:
        num_context = len(trajectory.prompt_token_ids) - 1
        kept = num_context if run.case.policy.type == "dense" else min(num_context, BUDGET)
        assert (trajectory.kv.context_tokens, trajectory.kv.context_kept) == (num_context, kept)
        assert bool(trajectory.mask.events) == (kept < num_context)
        if kept < num_context:
            visible = trajectory.mask.visible(trajectory.num_tokens - 1)[..., :num_context]
            assert (visible.sum(-1) == kept).all()
            assert trajectory.mask.events[0].first_row == num_context


def test_dense_replay_of_a_sparse_run_is_not_exact(run: Run) -> None:
    evicted = [t for t in run.trajectories if t.mask.events and t.kv.retained_fraction < 0.5]
    if run.case.policy.type == "dense":
        assert not evicted
    for trajectory in evicted:
        assert max_delta(trajectory, replay_dense(run.model, trajectory)) > 0.1, trajectory.group_id


def test_samples_of_a_group_share_the_mask_and_differ(run: Run) -> None:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in run.trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    for first, second in groups.values():
        assert {first.sample_index, second.sample_index} == {0, 1}
        assert first.mask == second.mask
    assert any(first.response_token_ids != second.response_token_ids for first, second in groups.values())


def test_blocks_are_accounted_for_and_given_back(run: Run) -> None:
    assert run.stats.blocks_in_use == 0
    assert 0 < run.stats.peak_blocks <= run.stats.num_blocks
    for trajectory in run.trajectories:
        num_context, num_tokens = trajectory.kv.context_tokens, trajectory.num_tokens - 1
        evicted = num_context - trajectory.kv.context_kept
        assert trajectory.kv.final_blocks == -(-(num_tokens - evicted) // 32)
        assert trajectory.kv.peak_blocks == max(-(-num_context // 32), trajectory.kv.final_blocks)


def test_carries_what_the_rest_of_the_system_needs(run: Run) -> None:
    for trajectory in run.trajectories:
        assert trajectory.policy == run.case.policy.type
        assert trajectory.temperature == run.case.temperature
        assert trajectory.weight_versions == (0,)
        assert trajectory.answer == str(len(trajectory.prompt_token_ids))
        assert set(trajectory.metadata) == {"row"}
        words = [f"t{token}" for token in trajectory.response_token_ids if token > 2]
        assert trajectory.text.split() == words
        assert trajectory.finish_reason == ("stop" if trajectory.response_token_ids[-1] == 1 else "length")


def test_only_straddling_windows_take_memory(run: Run) -> None:
    chunked = run.case.rollout.get("max_num_batched_tokens", 512) < 24
    # at most 23 queries of 4 heads x 32 dims in 3 layers, for each of 4 requests
    assert (0 < run.stats.reserved_buffer_bytes <= 4 * 23 * 3 * 4 * 32 * 4) == chunked


def test_every_mistake_is_far_off(run: Run) -> None:
    mistakes = set(MISTAKES)
    if run.case.policy.type == "streaming_llm":  # every layer and head keeps the same keys, so these are none
        mistakes -= {one_head_for_all, one_layer_for_all}
    evicted = [t for t in run.trajectories if t.kv.retained_fraction < 0.5]
    assert bool(evicted) == (run.case.policy.type != "dense")
    for mistake in mistakes if evicted else ():
        deltas = [max_delta(trajectory, mistake(run.model, trajectory)) for trajectory in evicted]
        assert min(deltas) > 100 * TOLERANCE and np.mean(deltas) > 0.1, f"{mistake.__name__}: {deltas}"
