"""An independent oracle: HF's own forward with an explicit boolean mask per layer and KV head.

Deliberately naive, and shares no code with the learner: the mask is written out from `ShadowMask.visible(row)` and
attention is three lines. Shapes: L layers, H_kv KV heads, T tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from kv_policies.shadow_mask import ShadowMask
from orchestration.contracts import Trajectory

_IMPLEMENTATION = "tests_explicit_mask"


def _attention(module, query, key, value, attention_mask, scaling, dropout=0.0, *, layer_masks, **unused):
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    mask = layer_masks[module.layer_idx].repeat_interleave(group, 0)
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights


def load_reference(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder, with attention that takes `layer_masks`."""
    AttentionInterface.register(_IMPLEMENTATION, _attention)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=_IMPLEMENTATION).eval()


def explicit_masks(mask: ShadowMask) -> torch.Tensor:
    """bool [L, H_kv, T, T]: what every row sees, written out row by row."""
    return torch.from_numpy(np.stack([mask.visible(row) for row in range(mask.num_tokens)], axis=2))


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    masks: torch.Tensor,
    *,
    num_response: int,
    temperature: float = 1.0,
    position_ids: Sequence[int] | None = None,
) -> np.ndarray:
    """float32 [R]: log-probabilities of the last `num_response` tokens under `masks` (bool [L, H_kv, T, T])."""
    ids = torch.tensor([list(token_ids)])
    positions = None if position_ids is None else torch.tensor([list(position_ids)])
    logits = model(ids, position_ids=positions, layer_masks=masks, use_cache=False).logits[0].float() / temperature
    logprobs = logits[-num_response - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[0, -num_response:, None])[:, 0].numpy()


def replay(model: PreTrainedModel, trajectory: Trajectory, masks: torch.Tensor | None = None) -> np.ndarray:
    """float32 [R]: log-probabilities of a response under its own shadow mask, or under `masks`."""
    return reference_logprobs(
        model,
        trajectory.prompt_token_ids + trajectory.response_token_ids,
        explicit_masks(trajectory.mask) if masks is None else masks,
        num_response=len(trajectory.response_token_ids),
        temperature=trajectory.temperature,
    )


def replay_dense(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """float32 [R]: log-probabilities of a response under plain causal attention."""
    mask = trajectory.mask
    dense = ShadowMask.dense(num_tokens=mask.num_tokens, num_layers=mask.num_layers, num_kv_heads=mask.num_kv_heads)
    return replay(model, trajectory, explicit_masks(dense))


def max_delta(trajectory: Trajectory, reference: np.ndarray) -> float:
    """max |delta log p| between the sampler and a reference, in nats."""
    return float(np.abs(trajectory.logprobs - reference).max())
