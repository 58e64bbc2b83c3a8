"""Block accounting under eviction: a request needs blocks for its slots, not for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from rollout_workers.sparse_kv.plan import EvictionPlan


@dataclass(frozen=True, kw_only=True)
class SparseFullAttentionSpec(FullAttentionSpec):
    """Full attention whose blocks are managed by `SparseKVCacheManager`; the memory layout is unchanged."""


@dataclass(frozen=True, kw_only=True)
class BlockUsage:
    """KV blocks that one request held: at most, and at its end."""

    peak: int
    final: int


class SparseKVCacheManager(FullAttentionManager):
    """vLLM's full-attention manager with a per-request shift between tokens and slots."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._plan: EvictionPlan | None = None
        self._prompt_tokens: Callable[[str], int] | None = None
        self._num_evicted: dict[str, int] = {}
        self._usage: dict[str, BlockUsage] = {}

    def bind(self, plan: EvictionPlan, prompt_tokens: Callable[[str], int]) -> None:
        """Gives the manager what vLLM does not pass to it: the plan, and the prompt length of a request."""
        self._plan, self._prompt_tokens = plan, prompt_tokens

    def evict(self, request_id: str, num_evicted: int, num_slots: int) -> None:
        """Notes that the worker compacted a request to `num_slots` slots and gives its tail blocks back."""
        if num_evicted == self._num_evicted.get(request_id, 0):
            return
        self._num_evicted[request_id] = num_evicted
        blocks = self.req_to_blocks[request_id]
        num_blocks = cdiv(num_slots, self.block_size)
        tail = blocks[num_blocks:]
        del blocks[num_blocks:]
        self.block_pool.free_blocks(reversed(tail))

    def take_usage(self, request_id: str) -> BlockUsage:
        """Hands out, and forgets, the usage of a request that ended."""
        return self._usage.pop(request_id, BlockUsage(peak=0, final=0))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        assert self._plan is not None and self._prompt_tokens is not None
        evicted = self._num_evicted.get(request_id, 0)
        if apply_admission_cap:  # the whole sequence must fit: what counts is its peak, the dense prefill included
            num_slots = self._plan.peak_slots(num_tokens, self._prompt_tokens(request_id))
        else:
            num_slots = num_tokens - evicted
        return super().get_num_blocks_to_allocate(
            request_id,
            num_slots,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model - evicted,
            apply_admission_cap,
            prefill_end,
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        evicted = self._num_evicted.get(request_id, 0)
        new_blocks = super().allocate_new_blocks(request_id, num_tokens - evicted, num_tokens_main_model - evicted)
        self._record(request_id, len(self.req_to_blocks[request_id]))
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        # Finish, abort or preemption. A preempted request starts again without evictions.
        self._num_evicted.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        if blocks:
            self._record(request_id, len(blocks))
        return blocks

    def _record(self, request_id: str, num_blocks: int) -> None:
        peak = self._usage[request_id].peak if request_id in self._usage else 0
        self._usage[request_id] = BlockUsage(peak=max(peak, num_blocks), final=num_blocks)


def register_spec() -> None:
    """Makes vLLM manage `SparseFullAttentionSpec` layers with `SparseKVCacheManager`. Idempotent."""
    # vLLM registers its own specs only into an empty registry, so they have to come first.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(SparseFullAttentionSpec, SparseKVCacheManager, FullAttentionSpec)
