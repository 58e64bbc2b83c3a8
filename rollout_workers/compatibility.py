"""Which models can be sampled under eviction and replayed by a mask: decided from the config file alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from rollout_workers.config import RolloutConfig

_MIN_CPU_HEAD_DIM = 32


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the engine has to know of a model before it loads it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * {"float32": 4, "bfloat16": 2}[dtype]


def check_model(model_path: str | Path) -> ModelShape:
    """Checks that a model folder holds a decoder-only model with full attention and RoPE in every layer.

    Only such a layer lets a key keep its meaning in another slot and lets one mask replay what a row saw.

    Raises:
        ValueError: one line that names the folder and everything that is not supported.
    """
    path = Path(model_path)
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path: expected a HF model folder with a config.json, got {path}")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if found := list(_unsupported(config)):
        raise ValueError(
            f"model.path: {path}: expected a decoder-only model with full attention and RoPE in every layer, "
            f"got {config.model_type} with {', '.join(found)}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
    )


def check_capacity(shape: ModelShape, rollout: RolloutConfig) -> None:
    """Checks that the KV pool can hold one sequence of the longest allowed length, and what the CPU kernels ask for.

    Raises:
        ValueError: the pool is too small, or the head or block size does not fit.
    """
    block_bytes = shape.kv_bytes_per_token(rollout.dtype) * rollout.block_size
    # One block is vLLM's null block. Prefill is dense, so a long prompt needs all its blocks once.
    needed = (-(-rollout.max_model_len // rollout.block_size) + 1) * block_bytes
    if rollout.kv_cache_bytes < needed:
        raise ValueError(
            f"rollout.kv_cache_bytes: expected at least {needed} (one sequence of rollout.max_model_len = "
            f"{rollout.max_model_len} tokens in blocks of {rollout.block_size}), got {rollout.kv_cache_bytes}"
        )
    if rollout.num_gpus_per_engine == 0:
        if rollout.block_size % 32:
            raise ValueError(f"rollout.block_size: expected a multiple of 32 on CPU, got {rollout.block_size}")
        if shape.head_dim < _MIN_CPU_HEAD_DIM or shape.head_dim % 16:
            raise ValueError(
                f"model.path: expected a head size of at least {_MIN_CPU_HEAD_DIM} and a multiple of 16 on CPU, "
                f"got {shape.head_dim}"
            )


def has_tokenizer(model_path: str | Path) -> bool:
    """Whether a model folder carries a tokenizer."""
    return any((Path(model_path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def stop_token_ids(model_path: str | Path, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Every token that ends a response: of the generation config, of the model config and of the tokenizer."""
    path = Path(model_path)
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            value = json.loads((path / name).read_text()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _unsupported(config: PretrainedConfig) -> Iterator[str]:
    """Names, for people, of everything in a config that rules a model out."""

    def value(name: str) -> Any:
        return getattr(config, name, None)

    kinds = set(value("layer_types") or ()) - {"full_attention"}
    sliding = "sliding_attention" in kinds or (
        not value("layer_types") and value("sliding_window") and value("use_sliding_window") is not False
    )
    architectures = value("architectures") or ()
    rope = value("rope_parameters") or value("rope_scaling") or value("rope_theta")
    checks = {
        "sliding-window layers": sliding,
        f"layers of type {sorted(kinds - {'sliding_attention'})}": kinds - {"sliding_attention"},
        "ALiBi": value("alibi") or value("use_alibi") or value("position_embedding_type") == "alibi",
        "multi-head latent attention": value("kv_lora_rank"),
        "recurrent layers": value("ssm_state_size") or value("mamba_d_state") or value("attn_layer_period"),
        "an encoder": value("is_encoder_decoder") or value("is_encoder_only"),
        "an image, audio or video part": value("vision_config") or value("audio_config"),
        "layers without RoPE": 0 in (value("no_rope_layers") or ()),
        "no RoPE": not rope,
        "attention soft-capping": value("attn_logit_softcapping"),
        f"architecture {architectures}": architectures and not any(a.endswith("ForCausalLM") for a in architectures),
    }
    return (name for name, present in checks.items() if present)
