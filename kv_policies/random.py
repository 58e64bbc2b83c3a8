"""Random eviction: the baseline that a policy has to beat."""

from __future__ import annotations

import hashlib

import torch

from kv_policies.config import RandomConfig
from kv_policies.policy import BudgetedPolicy, CacheView
from kv_policies.selection import keep_top


class Random(BudgetedPolicy):
    """Keeps uniformly drawn keys, independently per layer and KV head, and the last `window_tokens`.

    The draw is a function of (seed, context tokens, layer, number of keys): all samples of a group see the same keys,
    and a repeated run sees them again.
    """

    def __init__(self, config: RandomConfig) -> None:
        super().__init__(config)
        self._window = config.window_tokens
        self._seed = config.seed

    def select(self, view: CacheView) -> torch.Tensor:
        key = f"{self._seed}.{view.content_seed}.{view.layer}.{view.num_alive}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(view.num_kv_heads, view.num_alive - self._window, generator=generator)
        return keep_top(scores.to(view.positions.device), view.num_keep, self._window)
