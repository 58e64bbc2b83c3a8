"""Hand-made prompts and trajectories for tests that need no engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_policies.shadow_mask import ShadowMask
from orchestration.contracts import KVStats, PromptGroup, Trajectory


def make_trajectory(group_id: str = "g", sample_index: int = 0, **changes: Any) -> Trajectory:
    """Four prompt tokens, two response tokens, one eviction that leaves two of three context keys."""
    kept = np.array([[[0, 2], [1, 2]]])
    values: dict[str, Any] = {
        "group_id": group_id,
        "sample_index": sample_index,
        "prompt_token_ids": (5, 6, 7, 8),
        "response_token_ids": (9, 1),
        "logprobs": np.array([-0.25, -1.5], np.float32),
        "temperature": 0.7,
        "finish_reason": "stop",
        "weight_versions": (3,),
        "policy": "snapkv",
        "mask": ShadowMask.pack(num_tokens=6, num_layers=1, num_kv_heads=2, kept=[(3, kept)]),
        "kv": KVStats(context_tokens=3, context_kept=2, peak_blocks=2, final_blocks=1),
        "text": "nine ☃",
        "answer": {"value": [1, "a", None]},
        "metadata": {"source": "test"},
        "reward": 1.0,
    }
    return Trajectory(**values | changes)


class ListTask:
    """A task whose rewards are given: an exception among them is raised."""

    num_skipped = 0

    def __init__(self, rewards: dict[int, Any]) -> None:
        self._rewards = rewards

    def train_groups(self, step: int, num_groups: int) -> list[PromptGroup]:
        return [
            PromptGroup(group_id=f"{step}-{i}", prompt_token_ids=(5, 6), num_samples=len(self._rewards))
            for i in range(num_groups)
        ]

    def eval_groups(self, num_groups: int) -> list[PromptGroup]:
        return self.train_groups(-1, num_groups)

    def reward(self, trajectory: Trajectory) -> float:
        reward = self._rewards[trajectory.sample_index]
        if isinstance(reward, BaseException):
            raise reward
        return reward
