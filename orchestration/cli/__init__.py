"""The command line. One file per subcommand; what is heavy is imported by the subcommand that needs it.

Exit codes: 0 done; 1 the run failed, or `replay` found a mismatch; 2 bad input, before anything heavy started;
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from orchestration.cli import model, replay, rollout, train
from orchestration.errors import RunError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except RunError as error:
        return _fail(error, 1)
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt as error:
        return _fail(error, 130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penumbra",
        description="Memory-efficient RL post-training: vLLM rollouts under a compressed KV cache, replayed exactly.",
    )
    parser.add_argument("--version", action="version", version=f"penumbra {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (train, rollout, replay, model):
        command.add_parser(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("penumbra-rl")
    except metadata.PackageNotFoundError:
        return "(not installed: running from a source tree)"


def _fail(error: BaseException, code: int) -> int:
    """One message on stderr, and the notes that were added on the way (where the log is)."""
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
    for line in (message, *getattr(error, "__notes__", ())):
        print(f"penumbra: {line}", file=sys.stderr)
    return code
