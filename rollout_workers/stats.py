"""What an engine did so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters of one engine since it started.

    Example:
        >>> EngineStats(num_blocks=10, blocks_in_use=0, peak_blocks=8, num_preemptions=0, max_running=4,
        ...     mean_running=3.5, generated_tokens=100, generate_seconds=2.0, kv_capacity_bytes=1 << 20,
        ...     reserved_buffer_bytes=0).num_blocks
        10
    """

    num_blocks: int
    """KV blocks that requests can hold."""
    blocks_in_use: int
    """Right now; 0 when no request is in flight."""
    peak_blocks: int
    """Most in use in one step. Blocks that a dense engine shares among samples count once, except among samples that
    end in the same step."""
    num_preemptions: int
    max_running: int
    """Most requests in one step."""
    mean_running: float
    """Mean number of requests per step."""
    generated_tokens: int
    """Sampled tokens of requests that ended, aborted ones included."""
    generate_seconds: float
    """Time spent in engine steps."""
    kv_capacity_bytes: int
    """Size of the KV pool."""
    reserved_buffer_bytes: int
    """Most that this project's own buffers took beside the pool (window queries of prompts in chunked prefill)."""


class StepMeter:
    """Accumulates `EngineStats` step by step."""

    def __init__(self) -> None:
        self.peak_blocks = 0
        self.num_preemptions = 0
        self.max_running = 0
        self.generated_tokens = 0
        self.generate_seconds = 0.0
        self._num_steps = 0
        self._sum_running = 0

    def step(self, *, seconds: float, num_running: int, num_blocks: int) -> None:
        """Notes one engine step: its duration, the requests that ran in it and the KV blocks that they held."""
        self.generate_seconds += seconds
        self._num_steps += 1
        self._sum_running += num_running
        self.max_running = max(self.max_running, num_running)
        self.peak_blocks = max(self.peak_blocks, num_blocks)

    @property
    def mean_running(self) -> float:
        return self._sum_running / self._num_steps if self._num_steps else 0.0
