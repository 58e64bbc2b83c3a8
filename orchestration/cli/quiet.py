"""Keeps libraries off the console where a command prints a result and nothing else."""

from __future__ import annotations


def quiet_transformers() -> None:
    """No progress bars and no hints from transformers in this process; errors are still shown."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
