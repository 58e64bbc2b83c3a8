"""Which models are refused, and replay of hand-made trajectories."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from learner.config import AlgorithmConfig, LearnerConfig
from learner.environment import check_environment, single_rank_environment
from learner.model import check_config, check_model, load_model
from learner.replay import replay
from tests.helpers.masked import masked_trajectory, mixed_trajectories, with_logprobs
from tests.helpers.reference import load_reference
from tests.helpers.reference import replay as reference_replay


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(sliding_window=4096), "sliding_window|layer_types"),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0), "sliding_window|layer_types"),
        (Gemma2Config(), "layer_types"),
        (Gemma2Config(layer_types=["full_attention"] * 26), "softcapping|sliding_window"),
        (LlamaConfig(attention_dropout=0.1), "attention_dropout: expected 0"),
        (AutoConfig.for_model("bloom"), "ALiBi"),
        (AutoConfig.for_model("granite", logits_scaling=8.0), "logits_scaling"),
        (AutoConfig.for_model("t5", architectures=["T5ForConditionalGeneration"]), "architectures"),
    ],
)
def test_refuses_what_masks_cannot_replay(config, message):
    with pytest.raises(ValueError, match=message):
        check_config(config)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)])
def test_accepts_full_attention(config):
    check_config(config)


def test_refuses_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"model.path: expected a folder with config.json"):
        check_model(tmp_path)


def test_refuses_missing_weights(qwen3_gqa, tmp_path):
    weights = load_file(qwen3_gqa / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((qwen3_gqa / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model.norm.weight"):
        load_model(tmp_path, dtype="float32")


def test_config_refuses_contradictions():
    with pytest.raises(ValueError, match=r"measure_dense.*distillation_weight"):
        AlgorithmConfig(measure_dense=False, distillation_weight=0.1)
    with pytest.raises(ValueError, match=r"zero_stage.*bfloat16"):
        LearnerConfig(dtype="bfloat16", zero_stage=0)


def test_environment_is_checked(monkeypatch):
    environment = single_rank_environment(LearnerConfig(num_threads=3))
    assert environment["OMP_NUM_THREADS"] == "3" and environment["DS_ACCELERATOR"] == "cpu"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_environment()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE: expected 1.*got 2"):
        check_environment()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="missing MASTER_PORT"):
        check_environment()


def test_replay_reports_both_forwards(llama_mha_tied):
    """Log-probabilities of the reference: the masked forward agrees, the dense one does not."""
    reference = load_reference(llama_mha_tied)
    trajectories = mixed_trajectories(llama_mha_tied)
    trajectories = with_logprobs(trajectories, [reference_replay(reference, t) for t in trajectories])
    report = replay(trajectories, llama_mha_tied, config=LearnerConfig(micro_batch_tokens=64))
    assert report.masked.num_tokens == report.dense.num_tokens == sum(len(t.logprobs) for t in trajectories)
    assert report.masked.max < 2e-5
    assert report.dense.max > 0.1
    exaggerated = with_logprobs(trajectories, [t.logprobs - np.float32(0.5) for t in trajectories])
    assert replay(exaggerated, llama_mha_tied).masked.mean == pytest.approx(0.5, abs=1e-4)


def test_replay_in_bfloat16_and_of_nothing(llama_mha_tied):
    trajectories = [masked_trajectory(llama_mha_tied, 12, 4)]
    assert replay(trajectories, llama_mha_tied, dtype="bfloat16").masked.num_tokens == 4
    assert replay([], llama_mha_tied).masked.num_tokens == 0


def test_replay_refuses_another_models_masks(llama_mha_tied, tiny_model):
    other = tiny_model(architecture="qwen3", num_kv_heads=2)
    with pytest.raises(ValueError, match=r"mask.num_kv_heads: expected 4 .*, got 2"):
        replay([masked_trajectory(other, 12, 4)], llama_mha_tied)
