"""Advantages from the rewards of a group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def group_advantages(
    group_ids: Sequence[Hashable], rewards: Sequence[float] | np.ndarray, *, epsilon: float = 1e-6
) -> np.ndarray:
    """(R - mean) / (std + epsilon) within each group, std of the population.

    Groups may differ in size (dropped samples) and need not be contiguous. A group of one sample, or of equal
    rewards, gets zeros: it says nothing about what is better.

    Args:
        group_ids: [B].
        rewards: [B].

    Returns:
        float32 [B].

    Raises:
        ValueError: lengths differ, or a reward is not finite.

    Source: GRPO (arXiv 2402.03300).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(group_ids),):
        raise ValueError(f"rewards: expected [{len(group_ids)}] (one per group id), got {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards: expected finite numbers, got {values[~np.isfinite(values)][0]}")
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    advantages = np.zeros(values.shape, np.float32)
    for indices in members.values():
        group = values[indices]
        # Equal rewards are tested as such: the rounding error of their mean over epsilon would be an advantage.
        if group.min() < group.max():
            advantages[indices] = (group - group.mean()) / (group.std() + epsilon)
    return advantages
