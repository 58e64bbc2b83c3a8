"""The product as a user runs it: the command line in processes of its own, on the tiny model.

Two training runs: one that learns, and one of 20 steps at learning rate 0 whose reward function raises now and then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestration.cli import main
from orchestration.models.tiny import make_tiny_model
from orchestration.storage import load_trajectories

ROOT = Path(__file__).parents[2]
MASKED_TOLERANCE = 1e-4
DENSE_AT_LEAST = 1e-2

REWARD = """
def reward(*, response, answer, metadata, **_):
    if metadata["broken"]:
        raise KeyError("no reference")
    return float("value" in response)
"""


def penumbra(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, which must succeed."""
    command = [sys.executable, "-m", "orchestration", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def only_run(parent: Path) -> Path:
    (folder,) = parent.iterdir()
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", warmup_steps=20, seed=0)


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(
        f"""
        [run]
        name = "test"
        num_steps = 3
        prompts_per_step = 4
        eval_prompts = 8
        checkpoint_every_steps = 2
        [model]
        path = "{model}"
        [task]
        type = "needle"
        num_filler_tokens = 96
        [policy]
        type = "snapkv"
        budget_ratio = 0.5
        [sampling]
        group_size = 4
        max_response_tokens = 4
        [rollout]
        max_model_len = 128
        kv_cache_bytes = 67108864
        [learner.optimizer]
        learning_rate = 1e-4
        """
    )
    return path


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of a run that learns, and what it printed."""
    parent = tmp_path_factory.mktemp("trained")
    done = penumbra("train", config, "--set", f"run.output_dir={parent}")
    return only_run(parent), done.stdout


@pytest.fixture(scope="module")
def frozen(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of 20 steps at learning rate 0, on a task whose reward raises for some prompts."""
    folder = tmp_path_factory.mktemp("frozen")
    words = [[f"filler_{(i * 7 + j * 3) % 8}" for j in range(60)] + [f"value_{i % 16}"] for i in range(24)]
    rows = [{"prompt": " ".join(w), "answer": w[-1], "broken": i % 6 == 0} for i, w in enumerate(words)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    task = folder / "task.toml"
    task.write_text(f'[task]\ntype = "jsonl"\npath = "{folder}/rows.jsonl"\nreward = "{folder}/reward.py:reward"\n')
    settings = ["run.num_steps=20", "run.eval_prompts=0", "learner.optimizer.learning_rate=0"]
    settings += ["run.checkpoint_every_steps=0", f"run.output_dir={folder / 'runs'}"]
    penumbra("train", config, task, *(f"--set={setting}" for setting in settings))
    return read_metrics(only_run(folder / "runs"))[1:]


def test_every_step_is_exact_under_the_mask_and_not_without_it(trained: tuple[Path, str]) -> None:
    before, *steps = read_metrics(trained[0])
    assert before["step"] == 0 and 0 <= before["eval/reward_mean"] <= 1
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    for entry in steps:
        assert entry["mismatch/masked_max"] <= MASKED_TOLERANCE
        assert entry["mismatch/dense_max"] >= DENSE_AT_LEAST
        assert entry["rollout/retained_fraction"] == pytest.approx(0.5, abs=0.01)
        assert entry["samples/requested"] == entry["samples/scored"] == 16
        assert 0 <= entry["reward/mean"] <= 1
    assert len({entry["weights/checksum"] for entry in steps}) == 3
    assert "eval/reward_mean" in steps[-1]


def test_run_folder_is_complete(trained: tuple[Path, str], config: Path) -> None:
    folder, printed = trained
    resolved = tomllib.loads((folder / "config.toml").read_text())
    assert resolved["policy"]["window_tokens"] == 32
    assert resolved["task"]["num_filler_tokens"] == 96
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
    assert any((folder / "tensorboard").iterdir())
    assert any((folder / "logs").glob("worker-*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mismatch_masked_max"] <= MASKED_TOLERANCE < DENSE_AT_LEAST <= summary["mismatch_dense_max"]
    assert summary["kv_blocks_per_sample"] < summary["kv_blocks_per_sample_dense"]
    assert str(folder) in printed
    assert "before" in printed and "after" in printed and "of the context (snapkv)" in printed


def test_console_shows_no_noise_of_libraries(trained: tuple[Path, str]) -> None:
    for noise in ("vllm.", "INFO", "WARNING", "deepspeed]", "raylet"):
        assert noise not in trained[1]


def test_final_model_loads_in_transformers_and_differs_from_the_start(trained: tuple[Path, str], model: Path) -> None:
    final = trained[0] / "final"
    after, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (final, model))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(final).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()


def test_rollout_of_the_final_model_replays_and_another_model_does_not(
    trained: tuple[Path, str], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = trained[0] / "final"
    samples = tmp_path / "samples.parquet"
    penumbra("rollout", config, "--out", samples, "--num-prompts", "3", "--set", f"model.path={final}")
    trajectories = load_trajectories(samples)
    assert len(trajectories) == 12
    assert all(t.reward is not None and t.mask.events for t in trajectories)

    assert main(["replay", str(samples), "--model", str(final), "--tolerance", str(MASKED_TOLERANCE)]) == 0
    table = capsys.readouterr().out.splitlines()
    masked, dense = (line.split() for line in table if line.startswith(("masked", "dense")))
    assert float(masked[-1]) <= MASKED_TOLERANCE < DENSE_AT_LEAST <= float(dense[-1])

    other = make_tiny_model(tmp_path / "other", warmup_steps=0, seed=1)
    assert main(["replay", str(samples), "--model", str(other)]) == 1
    assert "exceeds the tolerance" in capsys.readouterr().out


def test_learning_rate_zero_leaves_everything_flat(frozen: list[dict[str, Any]]) -> None:
    assert [entry["weights/version"] for entry in frozen] == list(range(1, 21))
    assert len({entry["weights/checksum"] for entry in frozen}) == 1
    assert max(entry["mismatch/masked_max"] for entry in frozen) <= MASKED_TOLERANCE
    dense = np.array([entry["mismatch/dense_mean"] for entry in frozen])
    rewards = np.array([entry["reward/mean"] for entry in frozen])
    for values in (dense, rewards):
        first, second = values[:10], values[10:]
        standard_error = np.hypot(first.std(ddof=1), second.std(ddof=1)) / 10**0.5
        assert abs(first.mean() - second.mean()) <= 4 * standard_error
    assert 0 < rewards.mean() < 1


def test_samples_whose_reward_raises_are_counted_and_the_run_goes_on(frozen: list[dict[str, Any]]) -> None:
    dropped = [entry["samples/dropped_reward_error"] for entry in frozen]
    assert sum(dropped) > 0
    for entry in frozen:
        assert entry["samples/scored"] + entry["samples/dropped_reward_error"] == entry["samples/requested"] == 16
        assert entry["batch/sequences"] == entry["samples/scored"]
