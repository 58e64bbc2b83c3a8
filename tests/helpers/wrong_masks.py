"""The mistakes of published code, each as the log-probabilities that it would compute. Every one must be far off.

A trajectory has one eviction: rows before `first_row` saw everything, rows from it on saw the survivors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from orchestration.contracts import Trajectory
from tests.helpers.reference import explicit_masks, reference_logprobs, replay, replay_dense

Mistake = Callable[[PreTrainedModel, Trajectory], np.ndarray]


def _first_row(trajectory: Trajectory) -> int:
    return trajectory.mask.events[0].first_row


def dense_learner(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """No mask at all."""
    return replay_dense(model, trajectory)


def prompt_rows_masked(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """The final kept set used for every row, like an HF attention mask: prompt rows lose the evicted keys too."""
    masks = explicit_masks(trajectory.mask)
    final = masks[:, :, -1:, :]
    num_tokens = trajectory.num_tokens
    diagonal = torch.eye(num_tokens, dtype=torch.bool)
    return replay(model, trajectory, (final & torch.ones(num_tokens, num_tokens).tril().bool()) | diagonal)


def evicted_tokens_dropped(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """What the first layer's first head evicted is left out of the input; positions stay true."""
    kept = np.flatnonzero(trajectory.mask.visible(trajectory.num_tokens - 1)[0, 0])
    tokens = np.array(trajectory.prompt_token_ids + trajectory.response_token_ids)[kept]
    shape = trajectory.mask
    causal = torch.ones(len(kept), len(kept)).tril().bool().expand(shape.num_layers, shape.num_kv_heads, -1, -1)
    return reference_logprobs(
        model,
        tokens.tolist(),
        causal,
        num_response=len(trajectory.response_token_ids),
        temperature=trajectory.temperature,
        position_ids=kept.tolist(),
    )


def one_head_for_all(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """Head 0's kept set in every head."""
    masks = explicit_masks(trajectory.mask)
    return replay(model, trajectory, masks[:, :1].expand_as(masks))


def one_layer_for_all(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """Layer 0's kept sets in every layer."""
    masks = explicit_masks(trajectory.mask)
    return replay(model, trajectory, masks[:1].expand_as(masks))


def one_row_late(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """The last prompt token, first to run against the compressed context, still sees everything."""
    masks = explicit_masks(trajectory.mask)
    row = _first_row(trajectory)
    masks[:, :, row, : row + 1] = True
    return replay(model, trajectory, masks)


def one_row_early(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """The last context row, which ran dense, is masked as well."""
    masks = explicit_masks(trajectory.mask)
    row = _first_row(trajectory)
    masks[:, :, row - 1] = masks[:, :, row]
    masks[:, :, row - 1, row] = False
    masks[:, :, row - 1, row - 1] = True
    return replay(model, trajectory, masks)


def rope_renumbered(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """Rows after the eviction count their position in slots of the compressed cache."""
    row, kept = _first_row(trajectory), trajectory.kv.context_kept
    positions = [i if i < row else i - (row - kept) for i in range(trajectory.num_tokens)]
    return reference_logprobs(
        model,
        trajectory.prompt_token_ids + trajectory.response_token_ids,
        explicit_masks(trajectory.mask),
        num_response=len(trajectory.response_token_ids),
        temperature=trajectory.temperature,
        position_ids=positions,
    )


MISTAKES: tuple[Mistake, ...] = (
    dense_learner,
    prompt_rows_masked,
    evicted_tokens_dropped,
    one_head_for_all,
    one_layer_for_all,
    one_row_late,
    one_row_early,
    rope_renumbered,
)
