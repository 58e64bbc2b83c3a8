"""The worker's record of evictions, across chunks and preemptions, without an engine."""

import numpy as np
import pytest
import torch

from kv_policies.config import SnapKVConfig, StreamingLLMConfig
from kv_policies.policy import BudgetedPolicy, CacheView, Need
from kv_policies.registry import build_policy
from rollout_workers.sparse_kv.eviction import run_step
from rollout_workers.sparse_kv.tracker import EvictionTracker, StepRow, content_seed

LAYERS, KV_HEADS, HEADS, DIM, WINDOW = 2, 2, 4, 8, 6
PROMPT = tuple(range(3, 31))  # a context of 27 tokens


class Recorder(BudgetedPolicy):
    """Keeps the first keys and notes what it was shown."""

    needs = frozenset({Need.WINDOW_QUERIES})
    window_tokens = WINDOW

    def __init__(self, first: int = 0) -> None:
        super().__init__(SnapKVConfig(budget_tokens=10, window_tokens=WINDOW))
        self.views: list[CacheView] = []
        self.first = first

    def select(self, view: CacheView) -> torch.Tensor:
        self.views.append(view)
        return torch.arange(self.first, self.first + view.num_keep).expand(view.num_kv_heads, -1)


class ArrayCache:
    """A layer's cache as two plain tensors."""

    num_kv_heads = KV_HEADS
    attention_scale = 0.5

    def __init__(self, layer: int) -> None:
        self.layer = layer
        generator = torch.Generator().manual_seed(layer)
        self.keys = torch.randn(KV_HEADS, 64, DIM, generator=generator)
        self.values = torch.randn(KV_HEADS, 64, DIM, generator=generator)

    def read(self, row: int, num_slots: int):
        return self.keys[:, :num_slots].clone(), self.values[:, :num_slots].clone()

    def write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[:, : keys.shape[1]] = keys
        self.values[:, : values.shape[1]] = values


def queries_of(positions) -> torch.Tensor:
    """[n, H, D] whose every element is the position."""
    return torch.tensor(list(positions), dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM)


def prefill(tracker: EvictionTracker, ends, caches=None, request_id="a") -> list[ArrayCache]:
    """Runs the context in chunks that end at `ends`."""
    caches = caches or [ArrayCache(layer) for layer in range(LAYERS)]
    start = 0
    for end in ends:
        other = 3  # rows of another request come first in the step
        row = StepRow(
            request_id=request_id,
            row=1,
            query_start=other,
            num_computed_tokens=start,
            num_scheduled_tokens=end - start,
            prompt_token_ids=PROMPT,
        )
        step = tracker.plan_step([row])
        if step is not None:
            query = torch.cat([queries_of([-1] * other), queries_of(range(start, end))])
            for cache in caches:
                run_step(step, cache, query)
            tracker.finish_step(step)
        start = end
    return caches


@pytest.mark.parametrize("ends", [(27,), (20, 27), (24, 27), (22, 23, 24, 25, 26, 27), (5, 26, 27)])
def test_the_window_is_whole_however_the_prompt_is_chunked(ends) -> None:
    policy = Recorder()
    prefill(EvictionTracker(policy, LAYERS), ends)
    assert [view.layer for view in policy.views] == [0, 1]
    for view in policy.views:
        assert view.window_queries[:, 0, 0].tolist() == list(range(27 - WINDOW, 27))
        assert view.window_queries.shape == (WINDOW, HEADS, DIM)
        assert (view.num_alive, view.num_keep, view.num_layers) == (27, 10, LAYERS)


def test_only_earlier_chunks_of_the_window_are_copied() -> None:
    whole, straddling = EvictionTracker(Recorder(), LAYERS), EvictionTracker(Recorder(), LAYERS)
    prefill(whole, (15, 27))
    prefill(straddling, (15, 25, 27))
    assert whole.peak_buffer_bytes == 0
    assert straddling.peak_buffer_bytes == LAYERS * (WINDOW - 2) * HEADS * DIM * 4


def test_compaction_moves_keys_and_values_together() -> None:
    before = [ArrayCache(layer) for layer in range(LAYERS)]
    caches = prefill(EvictionTracker(Recorder(first=4), LAYERS), (27,))
    for old, new in zip(before, caches, strict=True):
        assert torch.equal(new.keys[:, :10], old.keys[:, 4:14])
        assert torch.equal(new.values[:, :10], old.values[:, 4:14])


def test_kept_positions_are_handed_out_once() -> None:
    tracker = EvictionTracker(Recorder(first=4), LAYERS)
    prefill(tracker, (27,))
    ((first_row, positions),) = tracker.take_kept("a")
    assert first_row == 27
    assert positions.shape == (LAYERS, KV_HEADS, 10)
    assert np.array_equal(positions[1, 1], np.arange(4, 14))
    assert tracker.take_kept("a") == []


def test_a_preempted_request_repeats_its_eviction() -> None:
    policy = Recorder(first=4)
    tracker = EvictionTracker(policy, LAYERS)
    prefill(tracker, (27,))
    policy.first = 9  # would choose otherwise now
    caches = prefill(tracker, (13, 27))
    assert len(policy.views) == LAYERS, "the policy was asked again"
    ((_, positions),) = tracker.take_kept("a")
    assert np.array_equal(positions[0, 0], np.arange(4, 14))
    assert torch.equal(caches[0].keys[:, :10], ArrayCache(0).keys[:, 4:14])


def test_a_request_preempted_inside_the_window_starts_it_anew() -> None:
    policy = Recorder()
    tracker = EvictionTracker(policy, LAYERS)
    caches = prefill(tracker, (24,))
    prefill(tracker, (25, 27), caches)
    assert policy.views[0].window_queries[:, 0, 0].tolist() == list(range(21, 27))


def test_short_prompts_and_forgotten_requests_leave_nothing() -> None:
    tracker = EvictionTracker(build_policy(StreamingLLMConfig(budget_tokens=40)), LAYERS)
    prefill(tracker, (27,))
    assert tracker.take_kept("a") == []
    tracker = EvictionTracker(Recorder(), LAYERS)
    prefill(tracker, (27,))
    tracker.forget(["a", "unknown"])
    assert tracker.take_kept("a") == []


@pytest.mark.parametrize(
    "indices",
    [
        torch.arange(10).flip(0).expand(KV_HEADS, -1),
        torch.zeros(KV_HEADS, 10, dtype=torch.int64),
        torch.arange(9).expand(KV_HEADS, -1),
        torch.arange(10).expand(1, -1),
        torch.arange(10, dtype=torch.int32).expand(KV_HEADS, -1),
    ],
    ids=["descending", "repeated", "too-few", "one-head", "int32"],
)
def test_a_policy_that_breaks_its_contract_is_named(indices: torch.Tensor) -> None:
    policy = Recorder()
    policy.select = lambda view: indices
    with pytest.raises(ValueError, match=r"Recorder.select: expected int64 \[2, 10\], strictly ascending"):
        prefill(EvictionTracker(policy, LAYERS), (27,))


def test_content_seed_depends_on_the_tokens_alone() -> None:
    assert content_seed((1, 2, 3)) == content_seed([1, 2, 3]) == 6520558355739401531  # also in another process
    assert content_seed((1, 2, 3)) != content_seed((1, 3, 2))
    assert 0 <= content_seed(range(50)) < 2**63
