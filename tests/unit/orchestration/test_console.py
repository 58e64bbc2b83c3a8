"""What is shown, on a terminal and in a log file."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestration.config import RunConfig
from orchestration.console import RunConsole, configure_logging, dropped_samples
from orchestration.summary import package_versions, summarise

METRICS: dict[str, Any] = {
    "reward/mean": 0.5,
    "loss/total": -0.0125,
    "loss/distillation_kl": 0.002,
    "mismatch/masked_max": 3e-6,
    "mismatch/masked_mean": 1e-7,
    "mismatch/dense_max": 1.5,
    "mismatch/dense_mean": 0.2,
    "rollout/tokens_per_s": 321.4,
    "rollout/response_tokens": 300,
    "rollout/retained_fraction": 0.5,
    "rollout/sample_final_blocks": 2.0,
    "rollout/sample_dense_blocks": 4.0,
    "samples/requested": 10,
    "samples/dropped_reward_error": 2,
    "samples/dropped_lone": 0,
    "samples/truncated": 1,
    "time/step_s": 2.5,
    "time/rollout_s": 1.5,
    "weights/checksum": "ab",
}
EVALUATION = {"eval/samples": 64, "eval/reward_mean": 0.25, "eval/reward_std": 0.1}


def make_config() -> RunConfig:
    policy = {"type": "snapkv", "budget_ratio": 0.5}
    return RunConfig.model_validate({"model": {"path": "m"}, "task": {"type": "needle"}, "policy": policy})


def show(*, terminal: bool, width: int = 80) -> str:
    out = io.StringIO()
    history = [
        {"step": 0, **EVALUATION},
        {"step": 1, **METRICS},
        {"step": 2, **METRICS, **EVALUATION, "eval/reward_mean": 0.75},
    ]
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False, soft_wrap=True)
    with RunConsole(2, console) as run_console:
        for entry in history:
            run_console.write(entry["step"], entry)
        run_console.summary(summarise(make_config(), history, total_s=5.0), Path("/runs/a"))
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = show(terminal=False)
    assert "\x1b" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["step", "reward", "loss", "KL", "masked", "dense", "tokens/s", "KV", "kept", "s"] in lines
    assert ["1/2", "0.500", "-0.0125", "2.00e-03", "3.0e-06", "1.5e+00", "321", "50%", "2.5"] in lines
    assert text.count("dropped: 2 reward raised") == 2
    assert "evaluation after step 0: reward 0.250 (64 held-out samples)" in text


def test_terminal_shows_a_progress_bar_too() -> None:
    text = show(terminal=True)
    assert "2/2" in text
    assert "\x1b" in text
    assert "3.0e-06" in text


def test_summary_says_what_changed_and_on_what_it_was_measured() -> None:
    text = show(terminal=False)
    assert "0.250 before, 0.750 after (held-out prompts, 64 samples)" in text
    assert "max 3.0e-06, mean 1.0e-07 nats" in text
    assert "50% of the context (snapkv); 2.0 blocks a sample at its end, 4.0 without eviction" in text
    assert "200 tokens/s, 600 tokens" in text
    assert "20 requested, 4 dropped, 2 truncated" in text
    assert f"torch {package_versions()['torch']}" in text
    assert "/runs/a/final" in text


def test_summary_without_evaluation_compares_first_and_last_step() -> None:
    history = [{"step": 0}, {"step": 1, **METRICS}, {"step": 2, **METRICS, "reward/mean": 0.9}]
    summary = summarise(make_config(), history, total_s=5.0)
    before_after = (summary["reward_before"], summary["reward_after"], summary["reward_source"])
    assert before_after == (0.5, 0.9, "first and last step")


def test_summary_of_a_run_that_scored_nothing_is_json() -> None:
    history = [{"step": 0}, {"step": 1, "samples/requested": 8, "samples/aborted": 8}]
    summary = summarise(make_config(), history, total_s=1.0)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["steps_skipped"], summary["samples_dropped"]["aborted"]) == (1, 8)
    assert summary["reward_after"] is None
    console = Console(file=io.StringIO())
    RunConsole(1, console).summary(summary, Path("/runs/a"))


def test_dropped_samples_are_named_by_reason() -> None:
    assert dropped_samples({"samples/aborted": 0}) == ""
    assert dropped_samples({"samples/aborted": 3, "samples/dropped_lone": 1}) == "3 aborted, 1 alone in their group"


@pytest.fixture
def root_logger() -> Any:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_logging_shows_warnings_and_keeps_everything(tmp_path: Path, root_logger: logging.Logger) -> None:
    out = io.StringIO()
    configure_logging(tmp_path / "driver.log", Console(file=out))
    logging.getLogger("some.library").info("a detail")
    logging.getLogger("some.library").warning("a [warning]")
    assert "a detail" not in out.getvalue()
    assert "a [warning]" in out.getvalue()
    assert "WARNING:" not in out.getvalue()
    kept = (tmp_path / "driver.log").read_text()
    assert "INFO some.library: a detail" in kept
    assert "WARNING some.library: a [warning]" in kept
