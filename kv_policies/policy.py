"""The policy interface: a policy chooses which keys survive; gathering and compacting them is the engine's work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from kv_policies.config import BudgetedPolicyConfig


class Need(Enum):
    """What a policy has to see before it can choose. A policy that lists nothing chooses by position alone."""

    WINDOW_QUERIES = "window_queries"
    ACCUMULATED_ATTENTION = "accumulated_attention"
    KEYS = "keys"


@dataclass(frozen=True, kw_only=True)
class CacheView:
    """One layer of one request's cache at the moment of an eviction. S keys are alive, H_kv KV heads, D head dim."""

    layer: int
    """Index of the layer, 0-based."""
    num_layers: int
    positions: torch.Tensor
    """int64 [H_kv, S]: absolute token positions of the alive keys, ascending."""
    num_keep: int
    """How many keys of every KV head survive, 1 <= num_keep < S."""
    content_seed: int
    """Derived from the token ids of the context: the same for all samples of a group, different between prompts."""
    keys: torch.Tensor | None = None
    """[H_kv, S, D] cached (rotated) keys, if the policy needs KEYS or WINDOW_QUERIES."""
    window_queries: torch.Tensor | None = None
    """[W, H, D] rotated queries of the last W rows, oldest first, if the policy needs WINDOW_QUERIES."""
    accumulated_attention: torch.Tensor | None = None
    """float32 [H_kv, S] attention mass received so far, if the policy needs ACCUMULATED_ATTENTION."""
    attention_scale: float = 1.0
    """Factor that the model applies to q.k before the softmax."""

    @property
    def num_kv_heads(self) -> int:
        return self.positions.shape[0]

    @property
    def num_alive(self) -> int:
        return self.positions.shape[1]


class Policy(ABC):
    """Which keys survive an eviction. Stateless: everything it may look at is in the `CacheView`."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    @property
    def window_tokens(self) -> int:
        """Number of trailing queries that must be shown (0 unless WINDOW_QUERIES is needed)."""
        return 0

    @abstractmethod
    def num_kept(self, num_prompt_tokens: int) -> int:
        """Keys of the context (prompt[:-1]) that survive: a pure function of the count, known before sampling.

        Args:
            num_prompt_tokens: P, at least 1.

        Returns:
            min(P - 1, resolved budget). Equal to P - 1 when nothing is evicted.
        """

    @abstractmethod
    def select(self, view: CacheView) -> torch.Tensor:
        """Chooses the survivors.

        Args:
            view: the alive keys of one layer.

        Returns:
            int64 [H_kv, num_keep]: indices into the S alive keys, strictly ascending in every row.
        """


class BudgetedPolicy(Policy):
    """A policy that keeps a fixed budget of the context, the same number in every layer and KV head."""

    def __init__(self, config: BudgetedPolicyConfig) -> None:
        self._config = config

    def num_kept(self, num_prompt_tokens: int) -> int:
        return min(num_prompt_tokens - 1, self._config.resolve_budget(num_prompt_tokens))
