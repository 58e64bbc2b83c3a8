"""How far the learner's log-probabilities are from the sampler's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class MismatchStats:
    """|delta log p| per response token, in nats. All zero for no tokens.

    Example:
        >>> MismatchStats.of(np.array([-1.0, -2.0]), np.array([-1.0, -2.5])).max
        0.5
    """

    mean: float
    p95: float
    p99: float
    max: float
    num_tokens: int

    @classmethod
    def of(cls, logprobs: np.ndarray, sampler_logprobs: np.ndarray) -> MismatchStats:
        """Compares two arrays [K]; a value that is not finite makes every statistic NaN."""
        delta = np.abs(logprobs.astype(np.float64) - sampler_logprobs.astype(np.float64))
        if not delta.size:
            return cls(mean=0.0, p95=0.0, p99=0.0, max=0.0, num_tokens=0)
        if not np.isfinite(delta).all():
            return cls(mean=np.nan, p95=np.nan, p99=np.nan, max=np.nan, num_tokens=delta.size)
        p95, p99 = np.quantile(delta, [0.95, 0.99])
        return cls(
            mean=float(delta.mean()), p95=float(p95), p99=float(p99), max=float(delta.max()), num_tokens=delta.size
        )

    def metrics(self, prefix: str) -> dict[str, float]:
        """As metrics: {prefix}_mean, _p95, _p99, _max."""
        return {f"{prefix}_{name}": getattr(self, name) for name in ("mean", "p95", "p99", "max")}
