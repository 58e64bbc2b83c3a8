"""`penumbra replay`: does the learner's forward reproduce what the sampler did?"""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestration.cli.quiet import quiet_transformers


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "replay",
        help="recompute log-probabilities of sampled responses and compare",
        description=(
            "Recomputes the log-probability of every sampled token in the learner's forward, under the recorded shadow "
            "masks and densely, and prints |delta log p| against the sampler. Exits 1 if the masked maximum exceeds "
            "the tolerance."
        ),
    )
    parser.add_argument("file", metavar="FILE.parquet", type=Path, help="what `penumbra rollout` wrote")
    parser.add_argument(
        "--model", metavar="DIR", type=Path, required=True, help="Hugging Face folder of the model that sampled"
    )
    parser.add_argument("--tolerance", metavar="NATS", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--device", metavar="NAME", help='"cpu", "cuda" (default: cuda where there is a GPU)')
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not (arguments.model / "config.json").is_file():
        raise ValueError(f"--model: expected a Hugging Face model folder (with config.json), got {arguments.model}")

    from orchestration.storage import load_trajectories

    trajectories = load_trajectories(arguments.file)
    if not trajectories:
        raise ValueError(f"{arguments.file}: expected at least one trajectory, got none")

    import torch

    from learner.replay import replay

    quiet_transformers()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = replay(trajectories, str(arguments.model), dtype=arguments.dtype, device=device)
    print(f"|delta log p| in nats over {report.masked.num_tokens} tokens of {len(trajectories)} samples")
    print(f"{'forward':<8} {'mean':>10} {'p99':>10} {'max':>10}")
    for name, stats in (("masked", report.masked), ("dense", report.dense)):
        print(f"{name:<8} {stats.mean:>10.2e} {stats.p99:>10.2e} {stats.max:>10.2e}")
    if report.masked.max <= arguments.tolerance:
        return 0
    print(f"masked maximum {report.masked.max:.2e} exceeds the tolerance {arguments.tolerance:.2e}")
    return 1
