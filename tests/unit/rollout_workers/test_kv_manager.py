"""Block accounting under eviction on vLLM's own block pool."""

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kv_policies.config import StreamingLLMConfig
from kv_policies.registry import build_policy
from rollout_workers.sparse_kv.kv_manager import (
    BlockUsage,
    SparseFullAttentionSpec,
    SparseKVCacheManager,
    register_spec,
)
from rollout_workers.sparse_kv.plan import EvictionPlan

BLOCK, PROMPT, BUDGET = 32, 300, 64


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=41, enable_caching=False, hash_block_size=BLOCK)


@pytest.fixture
def manager(pool: BlockPool) -> SparseKVCacheManager:
    spec = SparseFullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    manager = SparseKVCacheManager(
        spec, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=BLOCK
    )
    manager.bind(EvictionPlan(build_policy(StreamingLLMConfig(budget_tokens=BUDGET))), lambda request_id: PROMPT)
    return manager


def required(manager: SparseKVCacheManager, num_tokens: int, *, whole: bool = False) -> int:
    return manager.get_num_blocks_to_allocate("r", num_tokens, (), 0, 0, num_tokens, apply_admission_cap=whole)


def prefill(manager: SparseKVCacheManager) -> None:
    assert required(manager, PROMPT - 1) == 10
    manager.allocate_new_blocks("r", PROMPT - 1, PROMPT - 1)
    manager.evict("r", PROMPT - 1 - BUDGET, BUDGET)


def test_eviction_gives_the_tail_back(manager, pool) -> None:
    before = pool.get_num_free_blocks()
    prefill(manager)
    assert before - pool.get_num_free_blocks() == len(manager.req_to_blocks["r"]) == 2
    manager.evict("r", PROMPT - 1 - BUDGET, BUDGET + 5)  # said again at every later step: nothing more to give
    assert before - pool.get_num_free_blocks() == 2


def test_growth_counts_slots(manager) -> None:
    prefill(manager)
    assert required(manager, PROMPT) == 1  # slot 64 starts a third block
    manager.allocate_new_blocks("r", PROMPT, PROMPT)
    assert required(manager, PROMPT + 31) == 0
    assert required(manager, PROMPT + 32) == 1


def test_admission_asks_for_the_peak(manager) -> None:
    assert required(manager, PROMPT, whole=True) == 10
    assert required(manager, PROMPT + 200, whole=True) == 10, "265 slots are less than the dense prefill"
    assert required(manager, PROMPT + 300, whole=True) == 12


def test_a_freed_request_starts_dense_again_and_its_peak_stays(manager, pool) -> None:
    prefill(manager)
    pool.free_blocks(reversed(manager.pop_blocks_for_free("r")))  # preempted
    assert required(manager, PROMPT - 1) == 10
    prefill(manager)
    manager.free("r")
    assert pool.get_num_free_blocks() == 40
    assert manager.take_usage("r") == BlockUsage(peak=10, final=2)
    assert manager.take_usage("r") == BlockUsage(peak=0, final=0)


def test_registration_keeps_what_vllm_registers() -> None:
    register_spec()
    register_spec()
    spec = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    assert KVCacheSpecRegistry.get_manager_class(SparseFullAttentionSpec(**spec)) is SparseKVCacheManager
    assert KVCacheSpecRegistry.get_manager_class(FullAttentionSpec(**spec)) is FullAttentionManager
