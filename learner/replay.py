"""Recomputes the log-probabilities of trajectories, masked and dense. One process, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learner.collate import check_fits_model
from learner.config import LearnerConfig
from learner.mismatch import MismatchStats
from learner.model import PolicyModel, load_model
from learner.scoring import score
from orchestration.contracts import Trajectory


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The learner's log-probabilities against the sampler's, over all response tokens.

    Example:
        >>> exact = MismatchStats(mean=0.0, p95=0.0, p99=0.0, max=0.0, num_tokens=8)
        >>> ReplayReport(masked=exact, dense=exact).masked.max
        0.0
    """

    masked: MismatchStats
    """Under the shadow masks: numerics (and staleness, if the weights are not those that sampled)."""
    dense: MismatchStats
    """Under plain causal attention: what a learner that ignores the masks would see."""


def replay(
    trajectories: Sequence[Trajectory],
    model_path: str | Path,
    dtype: str = "float32",
    *,
    device: str = "cpu",
    config: LearnerConfig | None = None,
) -> ReplayReport:
    """Replays trajectories under the weights of a folder.

    Args:
        trajectories: at least one response token in all.
        model_path: HF folder.
        dtype: "float32" or "bfloat16".
        device: where the model runs, as torch names it ("cpu", "cuda").
        config: sizes of micro-batches and chunks; defaults if None.

    Raises:
        ValueError: the model is refused, or the trajectories' masks or tokens do not fit it.
    """
    config = config or LearnerConfig()
    causal_lm = load_model(model_path, dtype=dtype)
    check_fits_model(trajectories, causal_lm.config)
    model = PolicyModel(
        causal_lm,
        attention_chunk_rows=config.attention_chunk_rows,
        logit_chunk_tokens=config.logit_chunk_tokens,
    ).to(device)
    sampler = np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)])
    stats = {}
    for masked in (True, False):
        logprobs = score(model, trajectories, masked=masked, config=config, to_device=lambda batch: batch.to(device))
        stats[masked] = MismatchStats.of(np.concatenate([np.zeros(0, np.float32), *logprobs]), sampler)
    return ReplayReport(masked=stats[True], dense=stats[False])
