"""Keeps libraries off the console where a command prints a result and nothing else."""

from __future__ import annotations

import logging


def quiet_transformers() -> None:
    """No progress bars and no hints from transformers and DeepSpeed in this process; errors are still shown."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # transformers imports DeepSpeed where it is installed, and that names its accelerator at once. A filter, as it sets
    # the level of its logger itself.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
