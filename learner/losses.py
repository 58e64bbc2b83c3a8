"""Policy objectives, per token: functions of tensors, no engine. K response tokens.

The caller sums over its tokens and divides by the response tokens of the whole training batch, so a loss does not
depend on how the batch is split into micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PolicyLoss(NamedTuple):
    """Per-token terms, each [K]."""

    loss: torch.Tensor
    """To be minimised."""
    ratio: torch.Tensor
    """pi_theta / pi_sampler, no gradient."""
    clipped: torch.Tensor
    """bool: the token's gradient is cut off by the clip."""


def grpo_loss(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, advantages: torch.Tensor, *, clip_ratio: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - e, 1 + e) A), r = pi_theta(masked) / pi_sampler.

    The denominator is what the sampler reported, under the same shadow mask: on fresh samples r is 1 up to numerics.

    Args:
        logprobs: [K], masked, with gradient.
        sampler_logprobs: [K].
        advantages: [K].
        clip_ratio: e.

    Source: GRPO (arXiv 2402.03300); token mean over the batch as in DAPO (arXiv 2503.14476).
    """
    ratio = (logprobs - sampler_logprobs).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages
    return PolicyLoss(-torch.minimum(unclipped, clipped), ratio.detach(), clipped < unclipped)
