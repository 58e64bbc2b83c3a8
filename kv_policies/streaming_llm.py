"""StreamingLLM: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453)."""

from __future__ import annotations

import torch

from kv_policies.config import StreamingLLMConfig
from kv_policies.policy import BudgetedPolicy, CacheView


class StreamingLLM(BudgetedPolicy):
    """Keeps the first `num_sink_tokens` alive keys and the most recent ones.

    Positions stay absolute, unlike in the paper, which renumbers them inside the cache: a renumbered key could not be
    replayed by a mask.
    """

    def __init__(self, config: StreamingLLMConfig) -> None:
        super().__init__(config)
        self._num_sinks = config.num_sink_tokens

    def select(self, view: CacheView) -> torch.Tensor:
        sinks = min(self._num_sinks, view.num_keep)
        device = view.positions.device
        recent = torch.arange(view.num_alive - (view.num_keep - sinks), view.num_alive, device=device)
        kept = torch.cat([torch.arange(sinks, device=device), recent])
        return kept.expand(view.num_kv_heads, view.num_keep).contiguous()
