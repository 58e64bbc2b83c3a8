"""Select and compact, the same for every attention backend: a backend only brings its cache layout.

Shapes: H query heads, H_kv KV heads, S alive keys, K survivors, W window, D head dim.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kv_policies.policy import CacheView, Need
from rollout_workers.sparse_kv.tracker import Eviction, EvictionStep


class LayerCache(Protocol):
    """One layer's paged cache, read and written by request."""

    @property
    def layer(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def attention_scale(self) -> float: ...

    def read(self, row: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H_kv, num_slots, D] of the first slots of block-table row `row`, copied."""
        ...

    def write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites the first K slots of row `row` with keys and values [H_kv, K, D]."""
        ...


def attach_step(attention_metadata: Any, step: EvictionStep) -> None:
    """Hands a step to the attention layers, on the metadata object that this engine built for this step alone."""
    attention_metadata.eviction_step = step


def step_of(attention_metadata: Any) -> EvictionStep | None:
    """The step of `attach_step`; None where nothing is to do, and for every engine without a policy."""
    return getattr(attention_metadata, "eviction_step", None)


def run_step(step: EvictionStep, cache: LayerCache, query: torch.Tensor) -> None:
    """Does one layer's share of a step, after its attention ran.

    Args:
        step: what to capture and evict.
        cache: the layer's cache, this step's keys already in it.
        query: [tokens, H, D] rotated queries of the whole step.
    """
    for capture in step.captures:
        capture.request.window.setdefault(cache.layer, []).append(query[capture.rows].clone())
    for eviction in step.evictions:
        keys, values = cache.read(eviction.row, eviction.num_slots)
        if not eviction.forced:
            eviction.event.positions[cache.layer] = _select(step, eviction, cache, keys, query)
        # Only the first eviction of a request is planned today, so that slot and position are still the same.
        index = eviction.event.positions[cache.layer][..., None].expand(-1, -1, keys.shape[-1])
        cache.write(eviction.row, keys.gather(1, index), values.gather(1, index))


def _select(
    step: EvictionStep, eviction: Eviction, cache: LayerCache, keys: torch.Tensor, query: torch.Tensor
) -> torch.Tensor:
    """int64 [H_kv, K]: positions that survive, checked for what the rest of the system builds on."""
    needs = step.policy.needs
    window = None
    if Need.WINDOW_QUERIES in needs:
        window = torch.cat([*eviction.request.window.get(cache.layer, []), query[eviction.rows]])
    positions = torch.arange(eviction.num_slots, device=keys.device).expand(cache.num_kv_heads, -1)
    view = CacheView(
        layer=cache.layer,
        num_layers=step.num_layers,
        positions=positions,
        num_keep=eviction.num_keep,
        content_seed=eviction.content_seed,
        keys=keys if needs & {Need.WINDOW_QUERIES, Need.KEYS} else None,
        window_queries=window,
        attention_scale=cache.attention_scale,
    )
    indices = step.policy.select(view)
    expected = (cache.num_kv_heads, eviction.num_keep)
    if indices.shape != expected or indices.dtype != torch.int64 or not bool((indices.diff(dim=1) > 0).all()):
        raise ValueError(
            f"{type(step.policy).__name__}.select: expected int64 {list(expected)}, strictly ascending per row, "
            f"got {indices.dtype} {list(indices.shape)}"
        )
    return positions.gather(1, indices)
