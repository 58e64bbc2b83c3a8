"""What people see: a progress bar and one line per step on a terminal, the lines alone anywhere else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss/total", "{:+.4f}"),
    ("KL", "loss/distillation_kl", "{:.2e}"),
    ("masked", "mismatch/masked_max", "{:.1e}"),
    ("dense", "mismatch/dense_max", "{:.1e}"),
    ("tokens/s", "rollout/tokens_per_s", "{:.0f}"),
    ("KV kept", "rollout/retained_fraction", "{:.0%}"),
    ("s", "time/step_s", "{:.1f}"),
)
_WIDTH = 9


class RunConsole:
    """Shows a training run.

    Example:
        >>> with RunConsole(num_steps=10) as console:  # doctest: +SKIP
        ...     console.write(1, {"reward/mean": 0.5})
    """

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._header_shown = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=num_steps)

    def __enter__(self) -> RunConsole:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """One line of text."""
        self._console.print(text, markup=False)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The line of one step, and one for its evaluation if it has one."""
        if step > 0:
            self._show_header()
            self.note(f"{step:>5}/{self._num_steps:<5}" + "".join(_cell(metrics, *c[1:]) for c in _COLUMNS))
            dropped = dropped_samples(metrics)
            if dropped:
                self.note(f"            dropped: {dropped}")
            self._progress.update(self._task, completed=step, description="training")
        if "eval/samples" in metrics:
            reward = metrics.get("eval/reward_mean")
            self.note(
                f"evaluation after step {step}: reward "
                + (f"{reward:.3f}" if reward is not None else "unknown (no sample was scored)")
                + f" ({metrics['eval/samples']} held-out samples)"
            )

    def summary(self, summary: Mapping[str, Any], run_folder: Path) -> None:
        """The end of the run."""
        self._progress.stop()
        self.note("")
        for name, text in (
            *summary_lines(summary),
            ("run folder", run_folder),
            ("trained model", run_folder / "final"),
        ):
            self.note(f"{name:<18}{text}")

    def _show_header(self) -> None:
        if not self._header_shown:
            self.note("mismatch, masked and dense: max |delta log p| between sampler and learner, in nats")
            self.note(f"{'step':>5}      " + "".join(f"{name:>{_WIDTH}} " for name, *_ in _COLUMNS))
            self._header_shown = True


def dropped_samples(metrics: Mapping[str, Any]) -> str:
    """The samples of a step that do not train, by reason; empty if there are none."""
    names = {
        "samples/dropped_reward_error": "reward raised",
        "samples/dropped_reward_nan": "reward not a finite number",
        "samples/aborted": "aborted",
        "samples/dropped_lone": "alone in their group",
    }
    return ", ".join(f"{metrics[key]} {reason}" for key, reason in names.items() if metrics.get(key))


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as (name, text); what the run did not produce reads "-"."""

    def text(key: str, form: str) -> str:
        value = summary[key]
        return "-" if value is None else form.format(value)

    dropped = sum(summary["samples_dropped"].values())
    machine = summary["measured_on"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return [
        (
            "reward",
            f"{text('reward_before', '{:.3f}')} before, {text('reward_after', '{:.3f}')} after "
            f"({summary['reward_source']})",
        ),
        (
            "mismatch, masked",
            f"max {text('mismatch_masked_max', '{:.1e}')}, mean {text('mismatch_masked_mean', '{:.1e}')} nats",
        ),
        (
            "mismatch, dense",
            f"max {text('mismatch_dense_max', '{:.1e}')}, mean {text('mismatch_dense_mean', '{:.1e}')} nats",
        ),
        (
            "KV kept",
            f"{text('kv_retained_fraction', '{:.0%}')} of the context ({summary['policy']['type']}); "
            f"{text('kv_blocks_per_sample', '{:.1f}')} blocks a sample at its end, "
            f"{text('kv_blocks_per_sample_dense', '{:.1f}')} without eviction",
        ),
        ("rollout", f"{text('rollout_tokens_per_s', '{:.0f}')} tokens/s, {summary['rollout_tokens']} tokens"),
        (
            "samples",
            f"{summary['samples_requested']} requested, {dropped} dropped, {summary['samples_truncated']} truncated",
        ),
        ("steps", f"{summary['steps']}, {summary['steps_skipped']} skipped, {summary['time_total_s']:.0f} s"),
        ("measured on", ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["accelerators"]])),
        ("with", packages),
    ]


def configure_logging(log_path: Path, console: Console) -> None:
    """Sends everything to a file, and warnings and errors to the console too."""
    to_file = logging.FileHandler(log_path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_console = RichHandler(
        level=logging.WARNING, console=console, show_time=False, show_path=False, rich_tracebacks=False, markup=False
    )
    to_console.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_console], force=True)


def _cell(metrics: Mapping[str, Any], key: str, form: str) -> str:
    value = metrics.get(key)
    return f"{'-' if value is None else form.format(value):>{_WIDTH}} "
