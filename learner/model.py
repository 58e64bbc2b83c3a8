"""The HF model: what can be trained here, how it is loaded, and the forward passes of one micro-batch.

Shapes: N rows of S tokens, K response tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from learner.attention import ATTENTION, BiasAttention, register_attention
from learner.collate import MicroBatch
from learner.logprobs import TokenHead
from learner.losses import grpo_loss

_DROPOUTS = ("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_OUTPUT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def check_model(path: str | Path) -> PreTrainedConfig:
    """Reads the configuration of a model folder and refuses what shadow masks cannot replay. Loads no weights.

    Raises:
        ValueError: no config.json, not a causal language model, or an attention (sliding window, chunks, soft cap,
            ALiBi, latent), a dropout or a scale of the logits that the learner does not reproduce.
    """
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path: expected a folder with config.json, got {path}")
    config = AutoConfig.from_pretrained(path)
    check_config(config)
    return config


def check_config(config: PreTrainedConfig) -> None:
    """The part of `check_model` that looks at an existing configuration."""

    def refuse(field: str, expected: str, got: object) -> None:
        raise ValueError(f"model {config.model_type}: {field}: expected {expected}, got {got}")

    if not any(name.endswith("ForCausalLM") for name in config.architectures or ["ForCausalLM"]):
        refuse("architectures", "a causal language model (...ForCausalLM)", config.architectures)
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other_layers:
        refuse("layer_types", "full attention in every layer", other_layers)
    sliding_window = getattr(config, "sliding_window", None)
    # Without layer types, a window is used unless `use_sliding_window` (Qwen) says otherwise.
    if sliding_window and not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True):
        refuse("sliding_window", "none (a window evicts on its own, unseen by the shadow mask)", sliding_window)
    for field in ("attn_logit_softcapping", "attention_chunk_size", "kv_lora_rank", *_OUTPUT_SCALES):
        if getattr(config, field, None) not in (None, 1.0):
            refuse(field, "none (not reproduced by the masked attention)", getattr(config, field))
    for field in _DROPOUTS:
        if getattr(config, field, 0.0):
            refuse(field, "0 (dropout changes log-probabilities from pass to pass)", getattr(config, field))
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        refuse("position encoding", "rotary, baked into the cached keys", "ALiBi")


def load_model(path: str | Path, *, dtype: str) -> PreTrainedModel:
    """Loads a causal language model with shadow-masked attention, all parameters trainable.

    Args:
        path: HF folder with config.json and weights; no tokenizer needed.
        dtype: "float32" or "bfloat16".

    Raises:
        ValueError: as `check_model`, or the folder lacks some of the weights.
    """
    config = check_model(path)
    register_attention()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, output_loading_info=True
    )
    model, loading = loaded
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ValueError(f"model.path: {path}: expected all weights, {len(missing)} are missing: {missing[:3]}")
    if not model._supports_attention_backend:
        raise ValueError(f"model {config.model_type}: expected one that takes a custom attention, it does not")
    return model


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What `PolicyModel` minimises in one training step."""

    clip_ratio: float
    distillation_weight: float
    num_response_tokens: int
    """Of the whole training batch: the denominator of every micro-batch."""
    run_teacher: bool


class PolicyModel(nn.Module):
    """Student, teacher and loss in one forward.

    One module, because under ZeRO-3 the forward that runs must be the engine's.

    Args:
        causal_lm: from `load_model`.
        attention_chunk_rows: see `BiasAttention`.
        logit_chunk_tokens: see `TokenHead`.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, attention_chunk_rows: int, logit_chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.head = TokenHead(causal_lm.get_output_embeddings(), chunk_tokens=logit_chunk_tokens)
        self._attention_chunk_rows = attention_chunk_rows

    def forward(
        self, batch: MicroBatch, objective: Objective | None = None, *, masked: bool = True
    ) -> dict[str, torch.Tensor]:
        """Token statistics, and the loss if there is an objective.

        Args:
            batch: on the model's device.
            objective: None to score only.
            masked: under the shadow masks, or dense (scoring only).

        Returns:
            Scoring: `logprobs` and `entropy`, each [K]. Training: also `loss` (scalar, with gradient),
            `policy_loss`, `ratio`, `clipped`, and with a teacher `dense_logprobs` and `distillation_kl`, each [K],
            without gradient.
        """
        if objective is None:
            return self.head(self._hidden(batch, masked=masked), batch.target_ids, batch.temperatures)
        dense_hidden = None
        if objective.run_teacher and batch.evicted_at is not None:
            with torch.no_grad():
                dense_hidden = self._hidden(batch, masked=False)
        hidden = self._hidden(batch, masked=True)
        tokens = self.head(hidden, batch.target_ids, batch.temperatures, dense_hidden)
        if objective.run_teacher and batch.evicted_at is None:
            # Nothing was evicted: the teacher is the student.
            tokens["dense_logprobs"] = tokens["logprobs"]
            tokens["distillation_kl"] = torch.zeros_like(tokens["entropy"])
        policy = grpo_loss(
            tokens["logprobs"], batch.sampler_logprobs, batch.advantages, clip_ratio=objective.clip_ratio
        )
        total = policy.loss.sum()
        if objective.distillation_weight > 0:
            total = total + objective.distillation_weight * tokens["distillation_kl"].sum()
        outputs = tokens | {"policy_loss": policy.loss, "ratio": policy.ratio, "clipped": policy.clipped}
        return {name: value.detach() for name, value in outputs.items()} | {
            "loss": total / objective.num_response_tokens
        }

    def _hidden(self, batch: MicroBatch, *, masked: bool) -> torch.Tensor:
        """[K, E]: the final hidden states of the rows that predict the response tokens."""
        plan = BiasAttention(
            batch.position_ids, batch.evicted_at if masked else None, chunk_rows=self._attention_chunk_rows
        )
        output = self.causal_lm.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, attention_plan=plan
        )
        return output.last_hidden_state.flatten(0, 1)[batch.output_rows]
