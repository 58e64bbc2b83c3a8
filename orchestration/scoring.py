"""Rewards: scores samples and accounts for every one of them."""

from __future__ import annotations

import logging
import math
import numbers
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestration.contracts import Trajectory
from orchestration.tasks.base import Task

logger = logging.getLogger(__name__)

Outcome = Literal["scored", "aborted", "dropped_reward_error", "dropped_reward_nan"]


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Where the samples of one step went.

    requested = scored + dropped_reward_error + dropped_reward_nan + aborted.

    Example:
        >>> SampleCounts(requested=8, scored=7, aborted=1).dropped
        1
    """

    requested: int = 0
    scored: int = 0
    dropped_reward_error: int = 0
    """The reward function raised."""
    dropped_reward_nan: int = 0
    """The reward function returned something that is not a finite number."""
    aborted: int = 0
    """The engine gave the request up."""
    truncated: int = 0
    """Of the scored ones, those that ran into the token limit; they are kept."""

    @property
    def dropped(self) -> int:
        """Samples without a reward."""
        return self.requested - self.scored


class RewardScorer:
    """Applies the task's reward. A reward that fails costs its sample, never the run.

    The first failure of each kind is logged with its traceback, the others are only counted.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._reported: set[str] = set()

    def score(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], SampleCounts]:
        """Scores the samples of one step.

        Args:
            trajectories: all samples that the engines returned.

        Returns:
            The scored samples (`reward` is set), ordered by group and sample index so that a step does not depend on
            which sample finished first, and the counts; `requested` is the number of trajectories.
        """
        scored = [self.score_one(t) for t in sorted(trajectories, key=lambda t: (t.group_id, t.sample_index))]
        kept = [trajectory for trajectory, outcome in scored if outcome == "scored"]
        truncated = sum(trajectory.finish_reason == "length" for trajectory in kept)
        outcomes: Counter[str] = Counter(outcome for _, outcome in scored)
        return kept, SampleCounts(requested=len(scored), truncated=truncated, **outcomes)

    def score_one(self, trajectory: Trajectory) -> tuple[Trajectory, Outcome]:
        """The trajectory, with its reward if the outcome is "scored", and the count that it belongs to."""
        if trajectory.finish_reason == "abort":
            return trajectory, "aborted"
        where = f"sample {trajectory.group_id}/{trajectory.sample_index}"
        try:
            value = self._task.reward(trajectory)
        # User code: anything may come out of it, `sys.exit()` too, and it is counted and reported.
        except (Exception, SystemExit) as error:
            kind = f"error:{type(error).__name__}"
            self._report_once(kind, f"The reward of {where} raised; the sample is dropped.", error)
            return trajectory, "dropped_reward_error"
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            kind = "not finite" if isinstance(value, numbers.Real) else type(value).__name__
            self._report_once(
                kind, f"The reward of {where}: expected a finite number, got {value!r}; the sample is dropped."
            )
            return trajectory, "dropped_reward_nan"
        return replace(trajectory, reward=float(value)), "scored"

    def _report_once(self, kind: str, message: str, error: BaseException | None = None) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning("%s Others like it are only counted.", message, exc_info=error)


def drop_lone_samples(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], int]:
    """Removes samples that are alone in their group: an advantage needs at least two rewards to compare."""
    sizes = Counter(trajectory.group_id for trajectory in trajectories)
    kept = [trajectory for trajectory in trajectories if sizes[trajectory.group_id] > 1]
    return kept, len(trajectories) - len(kept)
