"""Log-probabilities, entropy and full-vocabulary KL from hidden states, without the logits of the whole batch.

Logits exist for one chunk of tokens at a time; the backward pass recomputes them. Shapes: K tokens, E hidden size,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class TokenHead(nn.Module):
    """The output projection, applied in chunks.

    A module that owns the (possibly tied) weight, so that ZeRO-3 gathers it once per pass and not once per chunk.

    Args:
        output: the model's output projection; its parameters are shared, not copied.
        chunk_tokens: tokens per chunk; changes memory and speed, not the result.
    """

    def __init__(self, output: nn.Linear, *, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = output.weight
        self.bias = output.bias
        self._chunk_tokens = chunk_tokens

    def forward(
        self,
        hidden: torch.Tensor,
        target_ids: torch.Tensor,
        temperatures: torch.Tensor,
        dense_hidden: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Statistics of each token's distribution, in float32 (float64 for a float64 model).

        Args:
            hidden: [K, E], final hidden states of the rows that predict the tokens.
            target_ids: int64 [K].
            temperatures: float32 [K].
            dense_hidden: [K, E], the teacher's; never receives a gradient.

        Returns:
            Each [K], in nats: `logprobs` of the targets; `entropy` (no gradient); with a teacher also
            `dense_logprobs` (no gradient) and `distillation_kl`, KL(sg[dense] || masked).
        """
        chunks = []
        for start in range(0, hidden.shape[0], self._chunk_tokens):
            tokens = slice(start, start + self._chunk_tokens)
            dense = None if dense_hidden is None else dense_hidden[tokens]
            inputs = (hidden[tokens], target_ids[tokens], temperatures[tokens], dense, self.weight, self.bias)
            if torch.is_grad_enabled():
                chunks.append(checkpoint(_chunk_statistics, *inputs, use_reentrant=False))
            else:
                chunks.append(_chunk_statistics(*inputs))
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperatures: torch.Tensor
) -> torch.Tensor:
    """[K, V] logits over temperature, in at least float32: sampler and learner compare their logarithms."""
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]


def forward_kl(dense_logprobs: torch.Tensor, masked_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(sg[dense] || masked) over the vocabulary, [..., V] -> [...], in nats.

    Both at the sampling temperature: that is the distribution that draws the tokens and that the policy objective
    moves, so it is the one to hold near the dense model. The gradient on the (temperature-scaled) masked logits is
    pi_masked - pi_dense, of which neither term vanishes where the other model puts its mass.

    Source: the distillation term of shadow-mask distillation (arXiv 2605.06850).
    """
    dense_logprobs = dense_logprobs.detach()
    return (dense_logprobs.exp() * (dense_logprobs - masked_logprobs)).sum(-1)


def _chunk_statistics(
    hidden: torch.Tensor,
    target_ids: torch.Tensor,
    temperatures: torch.Tensor,
    dense_hidden: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    all_logprobs = scaled_logits(hidden, weight, bias, temperatures).log_softmax(-1)
    statistics = {"logprobs": all_logprobs.gather(1, target_ids[:, None])[:, 0]}
    with torch.no_grad():
        statistics["entropy"] = -(all_logprobs.exp() * all_logprobs).sum(-1)
    if dense_hidden is not None:
        with torch.no_grad():
            dense = scaled_logits(dense_hidden, weight, bias, temperatures).log_softmax(-1)
            statistics["dense_logprobs"] = dense.gather(1, target_ids[:, None])[:, 0]
        statistics["distillation_kl"] = forward_kl(dense, all_logprobs)
    return statistics
