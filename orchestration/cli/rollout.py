"""`penumbra rollout`: samples only, for `penumbra replay` and for people."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from orchestration.cli.arguments import add_config_arguments
from orchestration.cli.signals import interrupt_on_sigterm
from orchestration.config import load_config


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "rollout",
        help="sample responses into a parquet file",
        description="Samples the first training prompts, scores the responses and writes them with their shadow masks.",
    )
    add_config_arguments(parser)
    parser.add_argument("--out", metavar="FILE.parquet", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--num-prompts", metavar="N", type=int, help="prompts to sample (default: run.prompts_per_step)"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.num_prompts is not None and arguments.num_prompts < 1:
        raise ValueError(f"--num-prompts: expected at least 1, got {arguments.num_prompts}")
    config = load_config(arguments.configs, arguments.overrides)

    from orchestration.placement import plan_bundles, reserved_cluster
    from orchestration.preflight import check_run
    from orchestration.sampling import stream_trajectories
    from orchestration.scoring import RewardScorer
    from orchestration.storage import TrajectoryWriter
    from orchestration.workers import start_engines, wait_until_ready

    task = check_run(config, with_learner=False)
    groups = task.train_groups(0, arguments.num_prompts or config.run.prompts_per_step)
    scorer = RewardScorer(task)
    outcomes: Counter[str] = Counter()
    with (
        TrajectoryWriter(arguments.out) as writer,
        reserved_cluster(plan_bundles(config, with_learner=False)) as placement_group,
    ):
        interrupt_on_sigterm()
        engines = start_engines(config, config.model.path, placement_group, first_bundle=0)
        wait_until_ready(engines)
        for sampled in stream_trajectories(engines, groups):
            trajectory, outcome = scorer.score_one(sampled)
            outcomes[outcome] += 1
            if outcome != "aborted":
                writer.write(trajectory)
    print(f"{arguments.out}: {outcomes.total() - outcomes['aborted']} samples of {len(groups)} prompts")
    for name, number in sorted(outcomes.items()):
        print(f"  {name}: {number}")
    return 0
