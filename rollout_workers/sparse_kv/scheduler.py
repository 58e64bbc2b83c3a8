"""vLLM's scheduler, which stops prefill chunks at the eviction boundary and frees the evicted blocks."""

from __future__ import annotations

from typing import cast

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from rollout_workers.sparse_kv.kv_manager import BlockUsage, SparseKVCacheManager
from rollout_workers.sparse_kv.options import policy_of
from rollout_workers.sparse_kv.plan import EvictionPlan


class SparseScheduler(Scheduler):
    """Continuous batching, chunked prefill and preemption stay vLLM's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._plan = EvictionPlan(policy_of(self.vllm_config))
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if [type(manager) for manager in managers] != [SparseKVCacheManager]:
            raise RuntimeError(
                "sparse KV: expected one KV cache group managed by SparseKVCacheManager, "
                f"got {[type(manager).__name__ for manager in managers]}"
            )
        self._manager = cast(SparseKVCacheManager, managers[0])
        self._manager.bind(self._plan, lambda request_id: self.requests[request_id].num_prompt_tokens)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        # Steps run in order on the worker: what was scheduled counts as compacted, its tail blocks can be handed on.
        for request in self.running:
            num_tokens = request.num_computed_tokens
            num_evicted = self._plan.num_evicted(num_tokens, request.num_prompt_tokens)
            self._manager.evict(request.request_id, num_evicted, num_tokens - num_evicted)
        return super().schedule(throttle_prefills)

    def take_block_usage(self, request_id: str) -> BlockUsage:
        """Hands out, and forgets, the KV blocks that an ended request held."""
        return self._manager.take_usage(request_id)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # vLLM's last word on the length of a chunk, asked for running and for waiting requests.
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        boundary = self._plan.next_boundary(num_computed_tokens, request.num_prompt_tokens)
        return num_new_tokens if boundary is None else min(num_new_tokens, boundary - num_computed_tokens)
