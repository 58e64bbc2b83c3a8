"""SnapKV: LLM Knows What You are Looking for Before Generation (arXiv 2404.14469)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from kv_policies.config import SnapKVConfig
from kv_policies.policy import BudgetedPolicy, CacheView, Need
from kv_policies.selection import keep_top, window_attention


class SnapKV(BudgetedPolicy):
    """Keeps the keys that the last `window_tokens` queries attend to most, and the window itself.

    score = avg_pool(mean over window and query group of causal softmax attention), per KV head. Pooling counts the
    zero padding at both ends, as the paper's code does.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.WINDOW_QUERIES})

    def __init__(self, config: SnapKVConfig) -> None:
        super().__init__(config)
        self._window = config.window_tokens
        self._kernel = config.pool_kernel

    @property
    def window_tokens(self) -> int:
        return self._window

    def select(self, view: CacheView) -> torch.Tensor:
        assert view.keys is not None and view.window_queries is not None
        attention = window_attention(view.window_queries, view.keys, view.attention_scale).mean((1, 2))
        scores = attention[:, : view.num_alive - self._window]
        scores = F.avg_pool1d(scores[:, None], self._kernel, stride=1, padding=self._kernel // 2)[:, 0]
        return keep_top(scores, view.num_keep, self._window)
