"""Models and settings that cannot be served are refused from their config alone."""

import json
from pathlib import Path

import pytest
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    T5Config,
)

from rollout_workers.compatibility import check_capacity, check_model, has_tokenizer, stop_token_ids
from rollout_workers.config import RolloutConfig
from tests.helpers.tiny_models import build_tiny_tokenizer


def folder(tmp_path: Path, config, **extra) -> Path:
    config.save_pretrained(tmp_path)
    if extra:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    return tmp_path


QWEN3 = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def test_reads_the_shape(tmp_path) -> None:
    shape = check_model(folder(tmp_path, Qwen3Config(vocab_size=99, **QWEN3)))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (3, 2, 32, 99)
    assert shape.kv_bytes_per_token("float32") == 2 * shape.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 32 * 4


def test_accepts_llama_and_mistral_without_a_window(tmp_path) -> None:
    assert check_model(folder(tmp_path, LlamaConfig(hidden_size=256, num_attention_heads=4))).head_dim == 64
    assert check_model(folder(tmp_path, MistralConfig(sliding_window=None))).num_kv_heads == 8


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding-window layers"),
        (MistralConfig(sliding_window=4096), "sliding-window layers"),
        (Gemma2Config(), "sliding-window layers, attention soft-capping"),
        (BloomConfig(), "no RoPE"),
        (GPT2Config(), "no RoPE"),
        (DeepseekV3Config(), "multi-head latent attention"),
        (T5Config(), "an encoder"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_refuses(tmp_path, config, reason: str) -> None:
    with pytest.raises(ValueError, match=f"model.path: .*{config.model_type} with .*{reason}"):
        check_model(folder(tmp_path, config))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"no_rope_layers": [1, 0, 1]}, "layers without RoPE"),
        ({"alibi": True}, "ALiBi"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
    ],
)
def test_refuses_what_a_config_file_says(tmp_path, extra, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_model(folder(tmp_path, Qwen3Config(**QWEN3), **extra))


def test_refuses_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"model.path: expected a HF model folder with a config.json, got .*nowhere"):
        check_model(tmp_path / "nowhere")


def test_the_pool_must_hold_one_longest_sequence(tmp_path) -> None:
    shape = check_model(folder(tmp_path, Qwen3Config(**QWEN3)))
    needed = (5 + 1) * 32 * 2 * 3 * 2 * 32 * 4
    check_capacity(shape, RolloutConfig(max_model_len=160, kv_cache_bytes=needed))
    with pytest.raises(ValueError, match=f"rollout.kv_cache_bytes: expected at least {needed} .*got {needed - 1}"):
        check_capacity(shape, RolloutConfig(max_model_len=160, kv_cache_bytes=needed - 1))


def test_cpu_kernels_want_blocks_of_32_and_heads_of_16(tmp_path) -> None:
    shape = check_model(folder(tmp_path, Qwen3Config(**QWEN3)))
    with pytest.raises(ValueError, match=r"rollout.block_size: expected a multiple of 32 on CPU, got 16"):
        check_capacity(shape, RolloutConfig(block_size=16))
    check_capacity(shape, RolloutConfig(block_size=16, num_gpus_per_engine=1))
    small = check_model(folder(tmp_path, Qwen3Config(**(QWEN3 | {"head_dim": 16}))))
    with pytest.raises(ValueError, match="head size of at least 32"):
        check_capacity(small, RolloutConfig())


def test_stop_tokens_come_from_everywhere(tmp_path) -> None:
    assert stop_token_ids(tmp_path) == ()
    folder(tmp_path, Qwen3Config(eos_token_id=7, **QWEN3))
    assert stop_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    assert stop_token_ids(tmp_path, tokenizer_eos=3) == (3, 7, 8, 9)


def test_finds_a_tokenizer(tmp_path) -> None:
    assert not has_tokenizer(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    assert has_tokenizer(tmp_path)
