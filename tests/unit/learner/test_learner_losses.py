"""Objectives, advantages and statistics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.advantages import group_advantages
from learner.logprobs import TokenHead, forward_kl
from learner.losses import grpo_loss
from learner.mismatch import MismatchStats


def test_grpo_loss_by_hand():
    """e = 0.2. Ratios 1, 1.5, 1.5, 0.5, 0.5 with advantages 2, 2, -2, 2, -2:
    min(2, 2), min(3, 2.4), min(-3, -2.4), min(1, 1.6), min(-1, -1.6)."""
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    sampler = torch.full((5,), -1.0, dtype=torch.float64)
    logprobs = (sampler + ratios.log()).requires_grad_()
    loss = grpo_loss(logprobs, sampler, advantages, clip_ratio=0.2)
    assert loss.loss.tolist() == pytest.approx([-2.0, -2.4, 3.0, -1.0, 1.6])
    assert loss.clipped.tolist() == [False, True, False, False, True]
    loss.loss.sum().backward()
    # d(-r A)/d log p = -r A where the clip is not active, else 0.
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, 3.0, -1.0, 0.0])


def test_kl_by_hand():
    dense = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    masked = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).log()
    assert forward_kl(dense, masked).item() == pytest.approx(0.25 * math.log(2))


def test_kl_gradient_is_masked_minus_dense():
    torch.manual_seed(0)
    dense_logits, masked_logits = torch.randn(2, 7, 50, dtype=torch.float64).unbind()
    dense_logits.requires_grad_()
    masked_logits.requires_grad_()
    forward_kl(dense_logits.log_softmax(-1), masked_logits.log_softmax(-1)).sum().backward()
    expected = masked_logits.softmax(-1) - dense_logits.softmax(-1)
    torch.testing.assert_close(masked_logits.grad, expected, rtol=0, atol=1e-14)
    assert dense_logits.grad is None


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_token_head_equals_whole_logits(chunk_tokens):
    """Values, and the gradient that reaches the hidden states: (pi_masked - pi_dense) W / temperature for the KL."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 40, bias=True).double()
    hidden, dense_hidden = torch.randn(2, 10, 8, dtype=torch.float64).unbind()
    hidden.requires_grad_()
    targets = torch.randint(0, 40, (10,))
    temperatures = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
    result = TokenHead(linear, chunk_tokens=chunk_tokens)(hidden, targets, temperatures, dense_hidden)
    masked = (linear(hidden) / temperatures[:, None]).log_softmax(-1).detach()
    dense = (linear(dense_hidden) / temperatures[:, None]).log_softmax(-1).detach()
    close = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(result["logprobs"], masked.gather(1, targets[:, None])[:, 0], **close)
    torch.testing.assert_close(result["dense_logprobs"], dense.gather(1, targets[:, None])[:, 0], **close)
    entropy = torch.distributions.Categorical(logits=masked).entropy()
    torch.testing.assert_close(result["entropy"], entropy, **close)
    result["distillation_kl"].sum().backward()
    expected = (masked.exp() - dense.exp()) @ linear.weight / temperatures[:, None]
    torch.testing.assert_close(hidden.grad, expected.detach(), **close)


def test_log_softmax_is_float32_under_bfloat16():
    head = TokenHead(torch.nn.Linear(8, 40, bias=False).bfloat16(), chunk_tokens=4)
    result = head(torch.randn(4, 8).bfloat16(), torch.zeros(4, dtype=torch.int64), torch.ones(4))
    assert result["logprobs"].dtype == result["entropy"].dtype == torch.float32


def test_advantages_by_hand():
    """Rewards 0, 0, 1, 1: mean 1/2, std 1/2. Rewards 1, 4, 1: mean 2, std sqrt 2."""
    ids = ["a", "b", "a", "a", "b", "a", "b"]
    rewards = [0.0, 1.0, 0.0, 1.0, 4.0, 1.0, 1.0]
    root = math.sqrt(2)
    expected = [-1, -1 / root, -1, 1, root, 1, -1 / root]
    advantages = group_advantages(ids, rewards)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)


def test_advantages_are_zero_without_a_comparison():
    """Equal rewards (0.1 thrice has a mean that is not 0.1 in floating point) and a group of one."""
    assert group_advantages(["a", "a", "a", "b"], [0.1, 0.1, 0.1, 5.0]).tolist() == [0.0] * 4
    assert group_advantages([], []).shape == (0,)


@pytest.mark.parametrize(("rewards", "message"), [([1.0], "expected \\[2\\]"), ([1.0, float("nan")], "finite")])
def test_advantages_refuse(rewards, message):
    with pytest.raises(ValueError, match=f"rewards: .*{message}"):
        group_advantages(["a", "a"], rewards)


def test_mismatch_by_hand():
    delta = np.arange(101) / 100
    stats = MismatchStats.of(-delta, np.zeros(101))
    assert (stats.mean, stats.p95, stats.p99, stats.max) == pytest.approx((0.5, 0.95, 0.99, 1.0))
    assert stats.num_tokens == 101
    assert stats.metrics("mismatch/masked")["mismatch/masked_p99"] == stats.p99
    assert MismatchStats.of(np.zeros(0), np.zeros(0)).max == 0.0
    assert np.isnan(MismatchStats.of(np.array([0.0, np.nan]), np.zeros(2)).max)
