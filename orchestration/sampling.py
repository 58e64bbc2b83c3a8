"""Sampling from the rollout actors: deals groups, streams samples back, scores them, accounts for every one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestration.contracts import PromptGroup, Trajectory
from orchestration.errors import WorkerError
from orchestration.scoring import RewardScorer, SampleCounts
from orchestration.workers import Worker


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The scored samples of some groups, where the others went, and how long it took."""

    trajectories: list[Trajectory]
    """Scored; ordered by group and sample index."""
    counts: SampleCounts
    seconds: float
    """Wall clock of sampling and scoring."""


def sample_groups(engines: Sequence[Worker], groups: Sequence[PromptGroup], scorer: RewardScorer) -> Samples:
    """Samples and scores all groups; raises like `stream_trajectories`."""
    start = time.perf_counter()
    trajectories, counts = scorer.score(list(stream_trajectories(engines, groups)))
    return Samples(trajectories=trajectories, counts=counts, seconds=time.perf_counter() - start)


def stream_trajectories(engines: Sequence[Worker], groups: Sequence[PromptGroup]) -> Iterator[Trajectory]:
    """Samples all groups, dealt round-robin to the engines, and yields each sample as it finishes.

    Raises:
        WorkerError: an engine failed, or finished without having returned every sample that it was asked for.
    """
    import ray

    dealt = [(engine, groups[i :: len(engines)]) for i, engine in enumerate(engines)]
    running: dict[Any, tuple[Worker, set[tuple[str, int]]]] = {
        engine.actor.generate.options(num_returns="streaming").remote(share): (engine, _expected(share))
        for engine, share in dealt
        if share
    }
    while running:
        ready, _ = ray.wait(list(running), num_returns=1)
        stream: Any = ready[0]
        engine, missing = running[stream]
        try:
            reference = next(stream)
        except StopIteration:
            if missing:
                raise WorkerError(f"{engine.name} returned no sample {min(missing)} ({len(missing)} missing)") from None
            del running[stream]
            continue
        trajectory: Trajectory = engine.wait(reference, "generate")
        key = (trajectory.group_id, trajectory.sample_index)
        if key not in missing:
            raise WorkerError(f"{engine.name} returned a sample that it was not asked for, or twice: {key}")
        missing.remove(key)
        yield trajectory


def _expected(groups: Sequence[PromptGroup]) -> set[tuple[str, int]]:
    return {(group.group_id, index) for group in groups for index in range(group.num_samples)}
