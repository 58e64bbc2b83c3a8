"""Every policy in one matrix: what it keeps, against naive references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_policies.config import DenseConfig, RandomConfig, SnapKVConfig, StreamingLLMConfig
from kv_policies.policy import CacheView
from kv_policies.registry import build_policy
from kv_policies.selection import keep_top, window_attention

CONFIGS = [
    SnapKVConfig(budget_tokens=12, window_tokens=4, pool_kernel=3),
    SnapKVConfig(budget_ratio=0.5, window_tokens=1, pool_kernel=1),
    StreamingLLMConfig(budget_tokens=12),
    StreamingLLMConfig(budget_tokens=12, num_sink_tokens=0),
    RandomConfig(budget_tokens=12, window_tokens=4),
    RandomConfig(budget_ratio=0.3, window_tokens=1),
]


def make_view(policy, num_alive: int, num_keep: int, *, kv_heads=2, group=2, head_dim=8, seed=0, **fields) -> CacheView:
    generator = torch.Generator().manual_seed(seed)
    window = policy.window_tokens
    defaults = dict(
        layer=1,
        num_layers=3,
        positions=torch.arange(num_alive).expand(kv_heads, num_alive),
        num_keep=num_keep,
        content_seed=11,
        keys=torch.randn(kv_heads, num_alive, head_dim, generator=generator),
        window_queries=torch.randn(window, kv_heads * group, head_dim, generator=generator) if window else None,
        attention_scale=head_dim**-0.5,
    )
    return CacheView(**{**defaults, **fields})


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@given(num_prompt=st.integers(1, 200), kv_heads=st.integers(1, 3), group=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_selection_is_ascending_within_bounds_and_as_long_as_promised(config, num_prompt, kv_heads, group):
    policy = build_policy(config)
    num_keep = policy.num_kept(num_prompt)
    assert 0 <= num_keep <= num_prompt - 1
    if num_keep == num_prompt - 1:
        return
    assert num_keep >= config.min_budget_tokens
    kept = policy.select(make_view(policy, num_prompt - 1, num_keep, kv_heads=kv_heads, group=group))
    assert kept.dtype == torch.int64 and kept.shape == (kv_heads, num_keep)
    assert (kept.diff(dim=1) > 0).all()
    assert kept.min() >= 0 and kept.max() == num_prompt - 2  # the most recent key always survives


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_selection_repeats(config):
    policy = build_policy(config)
    view = make_view(policy, 40, 14)
    torch.testing.assert_close(policy.select(view), policy.select(view))


def test_budgets():
    by_tokens = build_policy(SnapKVConfig(budget_tokens=32))
    assert [by_tokens.num_kept(p) for p in (1, 2, 31, 32, 33, 34, 500)] == [0, 1, 30, 31, 32, 32, 32]
    by_ratio = build_policy(SnapKVConfig(budget_ratio=0.5, window_tokens=8))
    assert [by_ratio.num_kept(p) for p in (1, 8, 9, 10, 40, 41)] == [0, 7, 8, 8, 20, 21]
    assert build_policy(DenseConfig()) is None


def test_window_attention_equals_a_naive_softmax():
    window, kv_heads, group, num_alive, dim = 3, 2, 2, 10, 4
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(window, kv_heads * group, dim, generator=generator, dtype=torch.float64)
    keys = torch.randn(kv_heads, num_alive, dim, generator=generator, dtype=torch.float64)
    got = window_attention(queries, keys, 0.5)
    for head in range(kv_heads):
        for member in range(group):
            for row in range(window):
                visible = num_alive - window + row + 1
                logits = keys[head, :visible] @ queries[row, head * group + member] * 0.5
                expected = torch.zeros(num_alive, dtype=torch.float64)
                expected[:visible] = logits.softmax(0)
                torch.testing.assert_close(got[head, member, row].double(), expected, atol=1e-6, rtol=1e-5)


def test_snapkv_keeps_what_the_window_attends_to():
    config = SnapKVConfig(budget_tokens=5, window_tokens=2, pool_kernel=1)
    policy = build_policy(config)
    keys = torch.zeros(1, 20, 4)
    keys[0, [3, 7, 11]] = torch.tensor([4.0, 0, 0, 0])
    queries = torch.zeros(2, 2, 4)
    queries[..., 0] = 1.0
    view = make_view(policy, 20, 5, kv_heads=1, keys=keys, window_queries=queries)
    assert policy.select(view).tolist() == [[3, 7, 11, 18, 19]]


def test_snapkv_kept_keys_have_the_highest_pooled_scores():
    config = SnapKVConfig(budget_tokens=12, window_tokens=4, pool_kernel=3)
    policy = build_policy(config)
    view = make_view(policy, 50, 12, seed=5)
    kept = policy.select(view)
    attention = window_attention(view.window_queries, view.keys, view.attention_scale).mean((1, 2))
    for head in range(2):
        score = attention[head, :46].tolist()
        pooled = [sum(score[max(0, j - 1) : j + 2]) / 3 for j in range(46)]
        best = sorted(sorted(range(46), key=lambda j: -pooled[j])[:8])
        assert kept[head].tolist() == [*best, 46, 47, 48, 49]


def test_snapkv_heads_and_layers_choose_for_themselves():
    policy = build_policy(SnapKVConfig(budget_tokens=8, window_tokens=2))
    kept = policy.select(make_view(policy, 60, 8, kv_heads=4))
    assert len({tuple(head) for head in kept.tolist()}) > 1


def test_streaming_llm_keeps_sinks_and_recent():
    policy = build_policy(StreamingLLMConfig(budget_tokens=6, num_sink_tokens=2))
    assert policy.select(make_view(policy, 20, 6, kv_heads=1)).tolist() == [[0, 1, 16, 17, 18, 19]]


def test_random_differs_by_layer_head_prompt_and_seed_and_is_uniform():
    policy = build_policy(RandomConfig(budget_tokens=10, window_tokens=2))
    kept = policy.select(make_view(policy, 40, 10))
    assert kept[0].tolist() != kept[1].tolist()
    for change in ({"layer": 2}, {"content_seed": 12}):
        assert policy.select(make_view(policy, 40, 10, **change)).tolist() != kept.tolist()
    other = build_policy(RandomConfig(budget_tokens=10, window_tokens=2, seed=1))
    assert other.select(make_view(other, 40, 10)).tolist() != kept.tolist()
    counts = torch.zeros(40)
    for content_seed in range(400):
        counts += torch.bincount(policy.select(make_view(policy, 40, 10, content_seed=content_seed))[0], minlength=40)
    assert (counts[38:] == 400).all()
    frequency = counts[:38] / 400
    assert frequency.min() > 0.1 and frequency.max() < 0.33  # expected 8 / 38 = 0.21


def test_keep_top_breaks_ties_by_position():
    assert keep_top(torch.zeros(1, 5), 4, 1).tolist() == [[0, 1, 2, 5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnapKVConfig(budget_tokens=16, window_tokens=32), "budget_tokens: expected at least 32"),
        (lambda: StreamingLLMConfig(budget_tokens=4), "budget_tokens: expected at least 5"),
        (lambda: RandomConfig(budget_tokens=3), "budget_tokens: expected at least 8"),
        (lambda: SnapKVConfig(), "expected exactly one of the two"),
        (lambda: SnapKVConfig(budget_tokens=64, budget_ratio=0.5), "expected exactly one of the two"),
        (lambda: SnapKVConfig(budget_tokens=64, pool_kernel=4), "pool_kernel: expected an odd number, got 4"),
        (lambda: SnapKVConfig(budget_ratio=1.5), "less than or equal to 1"),
        (lambda: RandomConfig(budget_tokens=64, windowtokens=3), "Extra inputs are not permitted"),
    ],
)
def test_bad_configuration_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
