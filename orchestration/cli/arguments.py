"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG.toml ... and --set."""
    parser.add_argument(
        "configs", metavar="CONFIG.toml", nargs="+", type=Path, help="run configuration; later files win key by key"
    )
    parser.add_argument(
        "--set",
        metavar="a.b=value",
        action="append",
        default=[],
        dest="overrides",
        help="override one setting, for example --set learner.optimizer.learning_rate=1e-6 (repeatable)",
    )
