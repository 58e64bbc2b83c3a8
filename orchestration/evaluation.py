"""Evaluation: the reward on held-out prompts, sampled exactly like the training prompts (same policy, same budget)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestration.metrics import MetricValue
from orchestration.sampling import sample_groups
from orchestration.scoring import RewardScorer
from orchestration.tasks.base import Task
from orchestration.workers import Worker


def evaluate(task: Task, engines: Sequence[Worker], scorer: RewardScorer, num_prompts: int) -> dict[str, MetricValue]:
    """Mean reward over the samples of `num_prompts` held-out prompts, as metrics.

    Returns:
        `eval/reward_mean` and `eval/reward_std` (absent if no sample could be scored), `eval/samples`,
        `eval/dropped`, `time/eval_s`.

    Raises:
        WorkerError: an engine failed.
    """
    samples = sample_groups(engines, task.eval_groups(num_prompts), scorer)
    metrics: dict[str, MetricValue] = {
        "eval/samples": samples.counts.scored,
        "eval/dropped": samples.counts.dropped,
        "time/eval_s": samples.seconds,
    }
    if samples.trajectories:
        rewards = np.array([t.reward for t in samples.trajectories], dtype=np.float64)
        metrics |= {"eval/reward_mean": float(rewards.mean()), "eval/reward_std": float(rewards.std())}
    return metrics
