"""The masked forward against HF with explicit boolean masks: values, gradients, layout, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_policies.shadow_mask import ShadowMask
from learner.collate import collate
from learner.config import LearnerConfig
from learner.model import Objective, PolicyModel, load_model
from learner.scoring import score
from tests.helpers.masked import (
    masked_trajectory,
    mixed_trajectories,
    reference_loss,
    with_logprobs,
)
from tests.helpers.reference import explicit_masks, load_reference, replay, replay_dense

MODELS = {
    "qwen3-gqa": dict(architecture="qwen3", num_kv_heads=2),
    "qwen3-mha": dict(architecture="qwen3", num_kv_heads=4, tied=True),
    "llama-gqa": dict(architecture="llama", num_kv_heads=1),
    "llama-mha": dict(architecture="llama", num_kv_heads=4, tied=True),
}
CLIP, DISTILLATION = 0.2, 0.3


@pytest.fixture(scope="module", params=MODELS)
def model_path(request, tiny_model):
    return tiny_model(**MODELS[request.param])


def policy_model(path, *, chunk_rows: int = 16, chunk_tokens: int = 5) -> PolicyModel:
    return PolicyModel(
        load_model(path, dtype="float32").train(), attention_chunk_rows=chunk_rows, logit_chunk_tokens=chunk_tokens
    )


def learner_scores(path, trajectories, *, masked=True, chunk_rows=16, micro_batch_tokens=10_000, packing=True):
    config = LearnerConfig(micro_batch_tokens=micro_batch_tokens, packing=packing)
    return score(policy_model(path, chunk_rows=chunk_rows), trajectories, masked=masked, config=config)


def max_error(actual, expected) -> float:
    return max(float(np.abs(a - e).max()) for a, e in zip(actual, expected, strict=True))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By HF name."""
    return {n.removeprefix("causal_lm."): p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest error of a gradient, over the largest gradient of the same parameter."""
    assert actual.keys() == expected.keys()
    return max(float((actual[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())


def train_gradients(model: PolicyModel, trajectories, advantages, **layout) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, accumulated over micro-batches."""
    objective = Objective(
        clip_ratio=CLIP,
        distillation_weight=DISTILLATION,
        num_response_tokens=sum(len(t.response_token_ids) for t in trajectories),
        run_teacher=True,
    )
    model.zero_grad()
    total = 0.0
    for batch in collate(trajectories, advantages, **layout):
        loss = model(batch, objective)["loss"]
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def near_policy(path, trajectories):
    """As if sampled by a slightly different policy, so that ratios are near 1 and some are clipped."""
    rng = np.random.default_rng(0)
    scores = learner_scores(path, trajectories)
    return with_logprobs(trajectories, [s + rng.normal(0, 0.2, s.shape) for s in scores])


ADVANTAGES = np.array([1.0, -0.5, 2.0, -1.0, 0.7, -0.2], np.float32)


def test_logprobs_equal_the_explicit_mask(model_path):
    trajectories = mixed_trajectories(model_path)
    reference = load_reference(model_path)
    assert max_error(learner_scores(model_path, trajectories), [replay(reference, t) for t in trajectories]) < 2e-5
    dense = learner_scores(model_path, trajectories, masked=False)
    assert max_error(dense, [replay_dense(reference, t) for t in trajectories]) < 2e-5


def test_loss_and_gradients_equal_the_explicit_mask(model_path):
    trajectories = near_policy(model_path, mixed_trajectories(model_path))
    reference = load_reference(model_path)
    expected = reference_loss(reference, trajectories, ADVANTAGES, clip_ratio=CLIP, distillation_weight=DISTILLATION)
    expected.backward()
    loss, actual = train_gradients(
        policy_model(model_path), trajectories, ADVANTAGES, micro_batch_tokens=10_000, packing=True
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(actual, gradients(reference)) < 1e-5


@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 10_000])
def test_chunk_size_does_not_matter(qwen3_gqa, chunk_rows):
    trajectories = near_policy(qwen3_gqa, mixed_trajectories(qwen3_gqa))
    layout = dict(micro_batch_tokens=10_000, packing=True)
    loss, expected = train_gradients(policy_model(qwen3_gqa), trajectories, ADVANTAGES, **layout)
    expected = {name: grad.clone() for name, grad in expected.items()}
    other = policy_model(qwen3_gqa, chunk_rows=chunk_rows, chunk_tokens=chunk_rows)
    other_loss, actual = train_gradients(other, trajectories, ADVANTAGES, **layout)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [60, 130, 10_000])
def test_packing_and_padding_equal_one_by_one(qwen3_gqa, masked, packing, micro_batch_tokens):
    trajectories = mixed_trajectories(qwen3_gqa)
    alone = [learner_scores(qwen3_gqa, [t], masked=masked)[0] for t in trajectories]
    together = learner_scores(
        qwen3_gqa, trajectories, masked=masked, packing=packing, micro_batch_tokens=micro_batch_tokens
    )
    assert max_error(together, alone) < 1e-5


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 60])
def test_loss_and_gradients_do_not_depend_on_micro_batches(qwen3_gqa, packing, micro_batch_tokens):
    trajectories = near_policy(qwen3_gqa, mixed_trajectories(qwen3_gqa))
    model = policy_model(qwen3_gqa)
    loss, expected = train_gradients(model, trajectories, ADVANTAGES, micro_batch_tokens=10_000, packing=True)
    expected = {name: grad.clone() for name, grad in expected.items()}
    split_loss, actual = train_gradients(
        model, trajectories, ADVANTAGES, micro_batch_tokens=micro_batch_tokens, packing=packing
    )
    assert split_loss == pytest.approx(loss, rel=1e-6)
    assert relative_error(actual, expected) < 1e-5


def test_truncation_does_not_change_a_logprob(qwen3_gqa):
    whole = masked_trajectory(qwen3_gqa, 30, 10, num_evictions=1)
    cut = replace(
        whole,
        response_token_ids=whole.response_token_ids[:4],
        logprobs=whole.logprobs[:4],
        mask=whole.mask.truncate(34),
    )
    expected, actual = learner_scores(qwen3_gqa, [whole, cut])
    assert np.abs(actual - expected[:4]).max() < 1e-5


def test_gradient_checkpointing_changes_nothing(qwen3_gqa):
    trajectories = near_policy(qwen3_gqa, mixed_trajectories(qwen3_gqa))
    layout = dict(micro_batch_tokens=130, packing=True)
    model = policy_model(qwen3_gqa)
    _, expected = train_gradients(model, trajectories, ADVANTAGES, **layout)
    expected = {name: grad.clone() for name, grad in expected.items()}
    model.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, actual = train_gradients(model, trajectories, ADVANTAGES, **layout)
    assert relative_error(actual, expected) < 1e-6


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            # A view of the stored size: an expanded mask would not be memory.
            if isinstance(tensor, torch.Tensor):
                stored = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.num_elements = max(self.num_elements, stored)
        return result


@pytest.mark.parametrize(("chunk_rows", "chunk_tokens", "fits"), [(32, 64, True), (512, 64, False), (32, 512, False)])
def test_no_tensor_of_s_by_s_elements(tiny_model, chunk_rows, chunk_tokens, fits):
    """Forward and backward, teacher included; whole rows, or whole logits, would be seen."""
    path = tiny_model(architecture="qwen3", num_kv_heads=2, vocab_size=1024, num_layers=1)
    num_tokens = 513
    trajectory = masked_trajectory(path, 20, num_tokens - 20, num_evictions=4)
    model = policy_model(path, chunk_rows=chunk_rows, chunk_tokens=chunk_tokens)
    with LargestTensor() as largest:
        train_gradients(model, [trajectory], np.ones(1, np.float32), micro_batch_tokens=10_000, packing=True)
    assert (largest.num_elements < (num_tokens - 1) ** 2) == fits


def _shared_heads(mask: ShadowMask) -> list:
    return [(row, [[layer[0]] * mask.num_kv_heads for layer in kept]) for row, kept in mask.unpack()]


def _shared_layers(mask: ShadowMask) -> list:
    return [(row, [kept[0]] * mask.num_layers) for row, kept in mask.unpack()]


def _one_row_late(mask: ShadowMask) -> list:
    return [(row + 1, [[np.append(head, row) for head in layer] for layer in kept]) for row, kept in mask.unpack()]


def _one_row_early(mask: ShadowMask) -> list:
    return [(row - 1, [[head[head < row - 1] for head in layer] for layer in kept]) for row, kept in mask.unpack()]


@pytest.mark.parametrize("mistake", [_shared_heads, _shared_layers, _one_row_late, _one_row_early])
def test_a_wrong_mask_shows(qwen3_gqa, mistake):
    """The learner computes what the wrong mask says, and that is far from the right log-probabilities."""
    right = masked_trajectory(qwen3_gqa, 40, 12)
    mask = right.mask
    wrong_mask = ShadowMask.pack(
        num_tokens=mask.num_tokens,
        num_layers=mask.num_layers,
        num_kv_heads=mask.num_kv_heads,
        kept=mistake(mask),
    )
    wrong = replace(right, mask=wrong_mask)
    right_scores, wrong_scores = learner_scores(qwen3_gqa, [right, wrong])
    reference = load_reference(qwen3_gqa)
    assert np.abs(right_scores - replay(reference, right)).max() < 2e-5
    assert np.abs(wrong_scores - replay(reference, right, explicit_masks(wrong_mask))).max() < 2e-5
    assert np.abs(wrong_scores - right_scores).max() > 0.01


def test_a_dense_forward_of_a_sparse_sample_shows(qwen3_gqa):
    trajectory = masked_trajectory(qwen3_gqa, 40, 12)
    masked, dense = (learner_scores(qwen3_gqa, [trajectory], masked=m)[0] for m in (True, False))
    assert np.abs(masked - dense).max() > 0.1
