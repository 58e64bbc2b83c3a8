"""The worker's memory of evictions: what each request kept, and what has to happen in the step at hand.

Independent of the model runner and of the attention backend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kv_policies.policy import Policy
from rollout_workers.sparse_kv.plan import EvictionPlan


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One request in one engine step."""

    request_id: str
    row: int
    """Its row of the block table."""
    query_start: int
    """Its first row among the step's queries."""
    num_computed_tokens: int
    num_scheduled_tokens: int
    prompt_token_ids: Sequence[int]


@dataclass(kw_only=True)
class KeptEvent:
    """One eviction of one request, filled layer by layer."""

    first_row: int
    """The first row that sees the survivors only."""
    positions: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> int64 [H_kv, K]: positions of the surviving keys, ascending."""


@dataclass(kw_only=True)
class RequestEvictions:
    """Everything that must outlive a step, and a preemption."""

    events: list[KeptEvent] = field(default_factory=list)
    window: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Layer -> window queries of earlier prefill chunks; empty unless a chunk ended inside the window."""

    @property
    def window_bytes(self) -> int:
        return sum(chunk.nbytes for chunks in self.window.values() for chunk in chunks)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Window queries of a chunk that ends before the boundary: `query[rows]` has to be kept for the next step."""

    request: RequestEvictions
    rows: slice


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Compaction of one request at the end of a step, in every layer."""

    request_id: str
    request: RequestEvictions
    row: int
    num_slots: int
    """Keys alive before."""
    num_keep: int
    rows: slice
    """The window queries of this step."""
    content_seed: int
    event: KeptEvent
    forced: bool
    """The event was decided before a preemption: rows were sampled under it, so it is repeated, not decided again."""


@dataclass(frozen=True, kw_only=True)
class EvictionStep:
    """What the attention layers of one step do beside attention."""

    policy: Policy
    num_layers: int
    captures: tuple[Capture, ...]
    evictions: tuple[Eviction, ...]


class EvictionTracker:
    """Plans each step's captures and evictions, and keeps the record of kept positions per request."""

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.plan = EvictionPlan(policy)
        self._policy = policy
        self._num_layers = num_layers
        self._requests: dict[str, RequestEvictions] = {}
        self.peak_buffer_bytes = 0
        """Most bytes that captured window queries took at one time."""

    def plan_step(self, rows: Iterable[StepRow]) -> EvictionStep | None:
        """The captures and evictions of a step; None if there is nothing to do."""
        captures, evictions = [], []
        for row in rows:
            num_prompt = len(row.prompt_token_ids)
            boundary = self.plan.next_boundary(row.num_computed_tokens, num_prompt)
            if boundary is None:
                continue
            end = row.num_computed_tokens + row.num_scheduled_tokens
            assert end <= boundary, f"{row.request_id}: a chunk runs across its eviction boundary {boundary}"
            request = self._requests.setdefault(row.request_id, RequestEvictions())
            if row.num_computed_tokens == 0:  # the first chunk, perhaps once more after a preemption
                request.window.clear()
            window_start = max(boundary - self._policy.window_tokens, row.num_computed_tokens)
            window = slice(
                row.query_start + min(window_start - row.num_computed_tokens, row.num_scheduled_tokens),
                row.query_start + row.num_scheduled_tokens,
            )
            decided = next((event for event in request.events if event.first_row == boundary), None)
            if end == boundary:
                evictions.append(self._eviction(row, request, window, boundary, decided))
            elif decided is None and window.start < window.stop:
                captures.append(Capture(request=request, rows=window))
        if not captures and not evictions:
            return None
        return EvictionStep(
            policy=self._policy, num_layers=self._num_layers, captures=tuple(captures), evictions=tuple(evictions)
        )

    def finish_step(self, step: EvictionStep) -> None:
        """Records what a step decided and drops the window queries that it used."""
        held = sum(request.window_bytes for request in self._requests.values())
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, held)
        for eviction in step.evictions:
            eviction.request.window.clear()
            if not eviction.forced:
                eviction.request.events.append(eviction.event)

    def take_kept(self, request_id: str) -> list[tuple[int, np.ndarray]]:
        """Hands out, and forgets, what a request kept: (first_row, int64 [L, H_kv, K]) per eviction."""
        request = self._requests.pop(request_id, RequestEvictions())
        return [
            (event.first_row, torch.stack([event.positions[layer] for layer in sorted(event.positions)]).cpu().numpy())
            for event in request.events
        ]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops what is left of requests that ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _eviction(
        self, row: StepRow, request: RequestEvictions, window: slice, boundary: int, decided: KeptEvent | None
    ) -> Eviction:
        num_prompt = len(row.prompt_token_ids)
        return Eviction(
            request_id=row.request_id,
            request=request,
            row=row.row,
            num_slots=boundary,
            num_keep=boundary - self.plan.num_evicted(boundary, num_prompt),
            rows=window,
            content_seed=content_seed(row.prompt_token_ids[:boundary]),
            event=KeptEvent(first_row=boundary) if decided is None else decided,
            forced=decided is not None,
        )


def content_seed(token_ids: Sequence[int]) -> int:
    """A stable 63-bit hash of token ids: equal for all samples of a group, in every process."""
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
