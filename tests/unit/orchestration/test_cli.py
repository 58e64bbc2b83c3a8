"""The command line refuses bad input in one line and exit code 2, before Ray or an engine starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from orchestration.cli import main
from orchestration.models.tiny import make_tiny_model
from orchestration.storage import save_trajectories
from tests.helpers.samples import make_trajectory

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", warmup_steps=0)


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": f"filler_{i % 8} value_{i % 16}", "answer": f"value_{i % 16}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [run]
        output_dir = "{tmp_path / "runs"}"
        [model]
        path = "{tiny}"
        [task]
        type = "jsonl"
        path = "{tmp_path / "rows.jsonl"}"
        [policy]
        type = "snapkv"
        budget_ratio = 0.5
        [rollout]
        max_model_len = 256
        """
    )
    return path


def assert_refused(capsys: pytest.CaptureFixture[str], code: int, *parts: str) -> None:
    import ray

    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("penumbra: error: ")
    assert error.count("\n") == 1, error
    for part in parts:
        assert part in error
    assert not ray.is_initialized()


def test_dry_run_prints_a_config_that_can_be_read_back(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "rollout.num_engines=2", "--set", "learner.num_cpus=1"]
    assert main(["train", str(config), *overrides, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    resolved = tomllib.loads(plan)
    assert resolved["rollout"]["num_engines"] == 2
    assert resolved["policy"] == {"type": "snapkv", "budget_ratio": 0.5, "window_tokens": 32, "pool_kernel": 5}
    assert [line for line in plan.splitlines() if line.startswith("#   ")] == [
        "#   learner: 1 CPU",
        "#   engine-0: 0.5 CPU",
        "#   engine-1: 0.5 CPU",
    ]
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["policy.budgett_ratio=0.5"], ["budgett_ratio"]),
        (["policy.budget_ratio=", "policy.budget_tokens=16"], ["budget_tokens", "32", "16"]),
        (["task.prompt_column=question", "task.messages_column=chat"], ["question"]),
        (["task.reward=nowhere:score"], ["task.reward", "nowhere"]),
        (["task.reward=exactmatch"], ["task.reward", "exact_match"]),
        (["rollout.num_engines=4000"], ["CPU", "2000.5"]),
        (["learner.num_gpus=64"], ["GPU", "64"]),
        (["model.path=/nowhere"], ["model.path", "/nowhere"]),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_bad_settings(config: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]) -> None:
    code = main(["train", str(config), *(f"--set={override}" for override in overrides)])
    assert_refused(capsys, code, *parts)
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize("override", ["task.reward=nowhere:score", "rollout.num_engines=4000", "model.path=/nowhere"])
def test_rollout_refuses_the_same(config: Path, capsys: pytest.CaptureFixture[str], override: str) -> None:
    out = config.parent / "out.parquet"
    assert_refused(capsys, main(["rollout", str(config), "--out", str(out), "--set", override]))
    assert not out.exists()


def test_model_without_tokenizer(config: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = shutil.copytree(tiny, config.parent / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    assert_refused(capsys, main(["train", str(config), f"--set=model.path={bare}"]), "model.path", "tokenizer")


def test_model_with_sliding_window(config: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sliding = shutil.copytree(tiny, config.parent / "sliding")
    settings = json.loads((sliding / "config.json").read_text())
    settings |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    settings["layer_types"] = ["sliding_attention"] * settings["num_hidden_layers"]
    (sliding / "config.json").write_text(json.dumps(settings))
    assert_refused(capsys, main(["train", str(config), f"--set=model.path={sliding}"]), "model.path", "sliding")


def test_config_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main(["train", str(tmp_path / "absent.toml")]), "absent.toml")


def test_rollout_of_no_prompts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["rollout", str(config), "--out", str(config.parent / "o.parquet"), "--num-prompts", "0"])
    assert_refused(capsys, code, "--num-prompts: expected at least 1, got 0")


def test_replay_of_something_else(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    for file in ("text.parquet", "absent.parquet"):
        assert_refused(capsys, main(["replay", str(tmp_path / file), "--model", str(tiny)]), file)
    save_trajectories(tmp_path / "none.parquet", [])
    code = main(["replay", str(tmp_path / "none.parquet"), "--model", str(tiny)])
    assert_refused(capsys, code, "none.parquet: expected at least one trajectory")


def test_replay_of_samples_of_another_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.parquet"
    save_trajectories(path, [make_trajectory()])
    assert_refused(capsys, main(["replay", str(path), "--model", str(tiny)]), "layers")
    assert_refused(capsys, main(["replay", str(path), "--model", str(tmp_path)]), "--model", "config.json")


def test_model_is_not_written_over_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("precious")
    for kind in ("tiny", "smollm2"):
        code = main(["model", kind, "--out", str(tmp_path)])
        assert_refused(capsys, code, "--out: expected a folder that is new or empty")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["train"], ["rollout", "a.toml"], ["replay", "a.parquet"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: penumbra" in capsys.readouterr().err


def test_help_and_version_load_nothing_heavy() -> None:
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        code = (
            "import sys; from orchestration.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "finally: print(sorted({'torch', 'vllm', 'ray', 'transformers', 'deepspeed'} & set(sys.modules)))"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, *arguments]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert shown.splitlines()[-1] == "[]"
        assert "penumbra" in shown


def test_module_is_the_same_command() -> None:
    command = [sys.executable, "-m", "orchestration", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.startswith("penumbra ")
