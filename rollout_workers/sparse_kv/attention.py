"""vLLM's CPU attention, which captures and evicts after a layer's attention if its step says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from rollout_workers.sparse_kv.cpu_layout import CPUCacheLayout
from rollout_workers.sparse_kv.eviction import run_step, step_of


@dataclass(frozen=True, kw_only=True)
class CPULayerCache:
    """`eviction.LayerCache` over the CPU layout."""

    layer: int
    num_kv_heads: int
    attention_scale: float
    layout: CPUCacheLayout
    kv_cache: torch.Tensor
    block_table: torch.Tensor

    def read(self, row: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layout.read(self.kv_cache, self.block_table[row].long(), num_slots)

    def write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layout.write(self.kv_cache, self.block_table[row].long(), keys, values)


class SparseCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention itself is vLLM's: a compacted request is just a shorter sequence."""

    _layout: CPUCacheLayout | None = None

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs) -> torch.Tensor:
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        step = step_of(attn_metadata)
        if step is not None:
            if self._layout is None:  # the instruction set of a layer is not known before its first step
                self._layout = CPUCacheLayout(kv_cache.dtype, kv_cache.shape[2], self.head_size, layer.isa)
            cache = CPULayerCache(
                layer=extract_layer_index(layer.layer_name),
                num_kv_heads=self.num_kv_heads,
                attention_scale=self.scale,
                layout=self._layout,
                kv_cache=kv_cache,
                block_table=attn_metadata.block_table,
            )
            run_step(step, cache, query)
        return result


class SparseCPUAttentionBackend(CPUAttentionBackend):
    """Selected instead of vLLM's CPU backend while the model of an evicting engine is built."""

    @staticmethod
    def get_impl_cls() -> type[SparseCPUAttentionImpl]:
        return SparseCPUAttentionImpl


@contextmanager
def sparse_attention_selected() -> Iterator[None]:
    """Within it, attention layers are built with `SparseCPUAttentionBackend`.

    The CPU platform ignores a backend asked for by name, so the override goes through vLLM's registry; that is process
    wide, hence the scope: another engine in this process keeps vLLM's own class.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{SparseCPUAttentionBackend.__name__}")
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()
