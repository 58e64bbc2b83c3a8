"""How many keys go, and when."""

import pytest

from kv_policies.config import SnapKVConfig, StreamingLLMConfig
from kv_policies.registry import build_policy
from rollout_workers.sparse_kv.plan import EvictionPlan

PLAN = EvictionPlan(build_policy(StreamingLLMConfig(budget_tokens=10)))


@pytest.mark.parametrize("num_prompt", [1, 2, 9, 10, 11])
def test_nothing_is_evicted_while_the_context_fits_the_budget(num_prompt: int) -> None:
    for num_tokens in range(30):
        assert PLAN.num_evicted(num_tokens, num_prompt) == 0
        assert PLAN.next_boundary(num_tokens, num_prompt) is None
        assert PLAN.peak_slots(num_tokens, num_prompt) == num_tokens


def test_evicts_once_at_the_end_of_the_context() -> None:
    assert [PLAN.num_evicted(n, 25) for n in (0, 23, 24, 25, 90)] == [0, 0, 14, 14, 14]
    assert [PLAN.next_boundary(n, 25) for n in (0, 23, 24, 25)] == [24, 24, None, None]


def test_the_smallest_eviction_is_one_key() -> None:
    assert PLAN.num_evicted(11, 12) == 1
    assert PLAN.next_boundary(0, 12) == 11


@pytest.mark.parametrize(("num_tokens", "slots"), [(10, 10), (24, 24), (25, 24), (38, 24), (39, 25), (90, 76)])
def test_peak_is_the_dense_prefill_until_the_response_is_longer(num_tokens: int, slots: int) -> None:
    assert PLAN.peak_slots(num_tokens, 25) == slots


def test_a_ratio_is_of_the_prompt() -> None:
    plan = EvictionPlan(build_policy(SnapKVConfig(budget_ratio=0.5, window_tokens=4)))
    assert plan.num_evicted(100, 101) == 100 - 51
