"""`penumbra train`: a whole training run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator

from orchestration.cli.arguments import add_config_arguments
from orchestration.cli.signals import interrupt_on_sigterm
from orchestration.config import RunConfig, dump_config, load_config
from orchestration.errors import RunError
from orchestration.placement import plan_bundles
from orchestration.run_folder import RunFolder, write_atomically

logger = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "train", help="train a model", description="Trains a model; everything it leaves behind is in one run folder."
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and resources, start nothing"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.configs, arguments.overrides)
    if arguments.dry_run:
        _print_plan(config)
    else:
        _train(config)
    return 0


def _print_plan(config: RunConfig) -> None:
    print(dump_config(config))
    print("# Resources, one Ray actor each:")
    for bundle in plan_bundles(config):
        print(f"#   {bundle.actor}: " + ", ".join(f"{n:g} {name}" for name, n in bundle.resources.items()))


def _train(config: RunConfig) -> None:
    from rich.console import Console

    from orchestration.console import RunConsole, configure_logging
    from orchestration.driver import Driver
    from orchestration.metrics import MetricsWriter
    from orchestration.placement import accelerators, reserved_cluster
    from orchestration.preflight import check_run
    from orchestration.summary import summarise
    from orchestration.workers import start_engines, start_learner, wait_until_ready

    task = check_run(config)
    folder = RunFolder.create(config.run.output_dir, config.run.name)
    write_atomically(folder.config_path, dump_config(config))
    terminal = Console(highlight=False, soft_wrap=True)
    configure_logging(folder.logs_dir / "driver.log", terminal)

    with (
        RunConsole(config.run.num_steps, terminal) as console,
        MetricsWriter(folder.metrics_path, folder.tensorboard_dir) as metrics,
        _supervised(folder),
        reserved_cluster(plan_bundles(config), log_dir=folder.logs_dir) as group,
    ):
        interrupt_on_sigterm()
        console.note(f"run folder: {folder.path}")
        console.note(f"starting the learner and {config.rollout.num_engines} rollout engine(s)")
        learner = start_learner(config, config.model.path, group, bundle=0)
        engines = start_engines(config, config.model.path, group, first_bundle=1)
        start = time.perf_counter()
        wait_until_ready([learner, *engines])
        logger.info("The actors were ready after %.1f s.", time.perf_counter() - start)
        start = time.perf_counter()
        history = Driver(config, task, engines, learner, folder, observers=[metrics, console]).train()
        summary = summarise(config, history, total_s=time.perf_counter() - start, accelerators=accelerators())
        folder.write_summary({"run_folder": str(folder.path), **summary})
        console.summary(summary, folder.path)


@contextlib.contextmanager
def _supervised(folder: RunFolder) -> Iterator[None]:
    """Writes the traceback of whatever ends the run to its log, and says where that is."""
    try:
        yield
    except BaseException as error:
        logger.info("The run ended early.", exc_info=True)
        note = f"logs: {folder.logs_dir}"
        if isinstance(error, (RunError, ValueError, OSError, KeyboardInterrupt, SystemExit)):
            error.add_note(note)
            raise
        failure = RunError(f"{type(error).__name__}: {error}")
        failure.add_note(note)
        raise failure from error
