"""What is refused before anything heavy starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from orchestration.config import RunConfig, load_config
from orchestration.models.tiny import make_tiny_model
from orchestration.preflight import check_model_folder, check_resources, check_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", warmup_steps=0)


@pytest.fixture
def configure(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    base = tmp_path / "run.toml"
    base.write_text(f'[model]\npath = "{tiny}"\n[task]\ntype = "needle"\n')

    def make(*overrides: str) -> RunConfig:
        return load_config([base], overrides)

    return make


def test_a_good_configuration_yields_its_task(configure) -> None:
    task = check_run(configure("task.num_filler_tokens=20"))
    assert len(task.train_groups(0, 2)) == 2


def test_lone_samples_cannot_be_trained_on_but_can_be_drawn(configure) -> None:
    config = configure("sampling.group_size=1", "task.num_filler_tokens=20")
    with pytest.raises(ValueError, match=r"^sampling\.group_size: expected at least 2 to train \(grpo .*, got 1$"):
        check_run(config)
    assert check_run(config, with_learner=False)


def test_missing_model_folder(configure) -> None:
    with pytest.raises(ValueError, match=r"model\.path: expected a Hugging Face model folder, there is none at /nope"):
        check_run(configure("model.path=/nope"))


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        ("*.safetensors", "expected weights"),
        ("tokenizer*", "expected a tokenizer"),
        ("config.json", "expected a HF model folder with a config.json"),
    ],
)
def test_incomplete_model_folder(configure, tiny: Path, tmp_path: Path, removed: str, expected: str) -> None:
    folder = shutil.copytree(tiny, tmp_path / "incomplete", ignore=shutil.ignore_patterns(removed))
    with pytest.raises(ValueError, match=rf"^model\.path: {expected}"):
        check_run(configure(f"model.path={folder}"))


def test_weights_that_were_cut_short(configure, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "cut")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=r"^model\.path: expected whole weights, .*model\.safetensors is damaged"):
        check_run(configure(f"model.path={folder}"))


def test_a_tokenizer_with_more_tokens_than_the_model(configure, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "small")
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 10
    config.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"^model\.path: expected a vocab_size of at least \d+ .*, got 10$"):
        check_run(configure(f"model.path={folder}"))


def test_sliding_window_layers(configure, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "sliding")
    config = AutoConfig.from_pretrained(folder)
    config.use_sliding_window, config.sliding_window = True, 16
    config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    config.save_pretrained(folder)
    with pytest.raises(ValueError, match="sliding-window layers"):
        check_run(configure(f"model.path={folder}"))


def test_kv_pool_below_one_request(configure) -> None:
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_bytes: expected at least \d+"):
        check_model_folder(configure("rollout.kv_cache_bytes=1000"), with_learner=True)


@pytest.mark.parametrize(
    ("override", "field", "asked"),
    [
        ("rollout.num_cpus_per_engine", "rollout.num_cpus_per_engine", (os.cpu_count() or 1) + 1),
        ("learner.num_cpus", "learner.num_cpus", (os.cpu_count() or 1) + 1),
        ("learner.num_gpus", "learner.num_gpus", 99),
    ],
)
def test_more_than_the_machine_has(configure, override: str, field: str, asked: int) -> None:
    with pytest.raises(ValueError, match="expected at most") as caught:
        check_resources(configure(f"{override}={asked}"), with_learner=True)
    assert field in str(caught.value)


def test_a_run_without_learner_needs_no_room_for_it(configure) -> None:
    check_resources(configure("learner.num_cpus=1000"), with_learner=False)


def test_an_existing_cluster_is_asked_later(configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_resources(configure("learner.num_cpus=1000"), with_learner=True)


def test_two_precisions_are_allowed_with_a_warning(configure, caplog: pytest.LogCaptureFixture) -> None:
    check_run(configure("learner.dtype=bfloat16", "learner.zero_stage=2", "task.num_filler_tokens=20"))
    assert "rollout.dtype = float32 and learner.dtype = bfloat16" in caplog.text


def test_prompts_that_are_all_too_long(configure) -> None:
    with pytest.raises(ValueError, match=r"longer than rollout\.max_model_len - sampling\.max_response_tokens = 64"):
        check_run(configure("task.num_filler_tokens=100", "rollout.max_model_len=128"))


def test_reward_function_that_is_not_there(configure, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "value_1", "answer": 1}\n{"prompt": "value_2", "answer": 2}\n')
    with pytest.raises(ValueError, match=r"task\.reward: expected a function 'nothing' in math"):
        check_run(configure("task.type=jsonl", f"task.path={data}", "task.reward=math:nothing"))
