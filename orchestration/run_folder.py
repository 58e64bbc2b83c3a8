"""The folder of one run.

    runs/<name>-<YYYYmmdd-HHMMSS>/
        config.toml        resolved: the run can be repeated from it
        metrics.jsonl      one object per step
        tensorboard/
        checkpoints/       step-<n>/, Hugging Face folders
        final/             the trained model, for transformers and vLLM
        summary.json
        logs/              driver.log and what the actors printed

Nothing is ever overwritten, and a folder that has its final name is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Example:
        >>> RunFolder(Path("/runs/a")).metrics_path.as_posix()
        '/runs/a/metrics.jsonl'
    """

    path: Path

    @classmethod
    def create(cls, parent: str | Path, name: str, now: datetime | None = None) -> RunFolder:
        """Makes a new folder `<name>-<time>` below `parent`, with a number behind it if that exists.

        Raises:
            ValueError: nothing can be made there.
        """
        stem = f"{name}-{now or datetime.now():%Y%m%d-%H%M%S}"
        for attempt in count():
            path = Path(parent).resolve() / (f"{stem}-{attempt}" if attempt else stem)
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ValueError(
                    f"run.output_dir: expected a folder that can be written to, got {parent}: {error.strerror}"
                ) from None
            folder = cls(path)
            folder.logs_dir.mkdir()
            folder.checkpoints_dir.mkdir()
            return folder
        raise AssertionError("unreachable")

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final_dir(self) -> Path:
        return self.path / "final"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    def checkpoint_dir(self, step: int) -> Path:
        """Where the model after `step` goes."""
        return self.checkpoints_dir / f"step-{step}"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json."""
        write_atomically(self.summary_path, json.dumps(summary, indent=2) + "\n")


def save_model(save: Callable[[str], Any], target: Path) -> None:
    """Lets `save` fill a temporary folder and renames it to `target` when it is whole.

    Args:
        save: writes a Hugging Face folder to the path that it is given; may run on another machine.
        target: must not exist.

    Raises:
        FileExistsError: `target` exists.
        FileNotFoundError: `save` wrote to a file system that this process does not see.
    """
    if target.exists():
        raise FileExistsError(f"{target}: exists; a checkpoint is never overwritten")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save(str(partial))
    if not partial.is_dir():
        raise FileNotFoundError(
            f"{partial}: the learner saved the model, but it is not here: the run folder must be on a file system "
            "that driver and learner share"
        )
    partial.rename(target)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file under a temporary name and renames it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
