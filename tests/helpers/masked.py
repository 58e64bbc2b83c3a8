"""Trajectories with random per-layer, per-head masks, and the training loss written out the slow way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from kv_policies.shadow_mask import ShadowMask
from orchestration.contracts import KVStats, Trajectory
from tests.helpers.reference import explicit_masks
from tests.helpers.tiny_models import random_prompt


def masked_trajectory(
    model_path: Path,
    num_prompt: int,
    num_response: int,
    *,
    seed: int = 0,
    num_evictions: int = 1,
    temperature: float = 1.0,
) -> Trajectory:
    """Random tokens and log-probabilities; half of the alive keys of every head go at each eviction.

    The first eviction is that of the prompt (first row P - 1), further ones are spread over the response.
    """
    config = AutoConfig.from_pretrained(model_path)
    num_layers, num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
    rng = np.random.default_rng(seed)
    num_tokens = num_prompt + num_response
    kept: list[tuple[int, np.ndarray]] = []
    alive = np.tile(np.arange(num_prompt - 1), (num_layers, num_kv_heads, 1))
    first_row = num_prompt - 1
    for event in range(num_evictions):
        num_keep = max(1, alive.shape[-1] // 2)
        order = rng.random(alive.shape).argsort(-1)[..., :num_keep]
        survivors = np.sort(np.take_along_axis(alive, order, -1), -1)
        kept.append((first_row, survivors))
        next_row = num_prompt - 1 + (event + 1) * num_response // num_evictions
        own = np.arange(first_row, next_row)
        alive = np.concatenate([survivors, np.broadcast_to(own, (num_layers, num_kv_heads, own.size))], -1)
        first_row = next_row
    mask = ShadowMask.pack(num_tokens=num_tokens, num_layers=num_layers, num_kv_heads=num_kv_heads, kept=kept)
    return Trajectory(
        group_id=f"g{seed}",
        sample_index=seed,
        prompt_token_ids=random_prompt(num_prompt, vocab_size=config.vocab_size, seed=seed),
        response_token_ids=random_prompt(num_response, vocab_size=config.vocab_size, seed=seed + 1000),
        logprobs=rng.normal(-4, 1, num_response).astype(np.float32),
        temperature=temperature,
        finish_reason="length",
        weight_versions=(0,),
        policy="random" if num_evictions else "dense",
        mask=mask,
        kv=KVStats(
            context_tokens=num_prompt - 1,
            context_kept=kept[0][1].shape[-1] if kept else num_prompt - 1,
            peak_blocks=1,
            final_blocks=1,
        ),
    )


def mixed_trajectories(model_path: Path) -> list[Trajectory]:
    """Different lengths, temperatures and numbers of evictions; shortest prompt and shortest response included."""
    shapes = [(23, 7, 1, 1.0), (40, 12, 3, 0.7), (9, 1, 1, 1.0), (1, 5, 0, 0.7), (31, 4, 0, 1.0), (17, 9, 2, 1.3)]
    return [
        masked_trajectory(model_path, prompt, response, seed=i, num_evictions=evictions, temperature=temperature)
        for i, (prompt, response, evictions, temperature) in enumerate(shapes)
    ]


def with_logprobs(trajectories: Sequence[Trajectory], logprobs: Sequence[np.ndarray]) -> list[Trajectory]:
    """The trajectories as if the sampler had reported `logprobs`."""
    return [replace(t, logprobs=np.asarray(lp, np.float32)) for t, lp in zip(trajectories, logprobs, strict=True)]


def response_distributions(model: PreTrainedModel, trajectory: Trajectory, masks: torch.Tensor) -> torch.Tensor:
    """[R, V]: log-softmax over the vocabulary for every response token, with gradient; one sequence, whole logits."""
    ids = torch.tensor([trajectory.prompt_token_ids + trajectory.response_token_ids])
    logits = model(ids, layer_masks=masks, use_cache=False).logits[0] / trajectory.temperature
    return logits[-len(trajectory.response_token_ids) - 1 : -1].log_softmax(-1)


def dense_masks(trajectory: Trajectory) -> torch.Tensor:
    """bool [L, H_kv, T, T], causal."""
    mask = trajectory.mask
    return explicit_masks(
        ShadowMask.dense(num_tokens=mask.num_tokens, num_layers=mask.num_layers, num_kv_heads=mask.num_kv_heads)
    )


def reference_loss(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    *,
    clip_ratio: float,
    distillation_weight: float,
) -> torch.Tensor:
    """GRPO plus distillation, sequence by sequence on whole logits, divided by all response tokens."""
    total = torch.zeros(())
    for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
        student = response_distributions(model, trajectory, explicit_masks(trajectory.mask))
        with torch.no_grad():
            teacher = response_distributions(model, trajectory, dense_masks(trajectory))
        chosen = student[torch.arange(student.shape[0]), torch.tensor(trajectory.response_token_ids)]
        ratio = torch.exp(chosen - torch.from_numpy(trajectory.logprobs))
        clipped = torch.clamp(ratio, 1 - clip_ratio, 1 + clip_ratio)
        total = total - torch.minimum(ratio * advantage, clipped * advantage).sum()
        total = total + distillation_weight * torch.nn.functional.kl_div(
            student, teacher, log_target=True, reduction="sum"
        )
    return total / sum(len(t.response_token_ids) for t in trajectories)
