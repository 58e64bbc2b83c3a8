"""SIGTERM (Slurm, Kubernetes, `kill`) ends a run like Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType


def interrupt_on_sigterm() -> None:
    """Turns SIGTERM into KeyboardInterrupt from here on. To be called after Ray has started: Ray installs a handler of
    its own, which aborts the process with actors and temporary files still there."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
