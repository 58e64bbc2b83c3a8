"""The synchronous training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from learner.advantages import group_advantages
from orchestration.config import RunConfig
from orchestration.contracts import TrainingBatch, Trajectory, WeightSnapshot
from orchestration.errors import NoUsableSamplesError
from orchestration.evaluation import evaluate
from orchestration.metrics import MetricValue, engine_metrics, sample_metrics
from orchestration.run_folder import RunFolder, save_model
from orchestration.sampling import Samples, sample_groups
from orchestration.scoring import RewardScorer, drop_lone_samples
from orchestration.tasks.base import Task
from orchestration.workers import Worker, engine_stats, push_weights

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 3
"""So many steps in a row without one usable sample end the run; a shorter run ends if it had none at all."""

StepMetrics = dict[str, MetricValue]


class StepObserver(Protocol):
    """Is told the metrics of each step (`MetricsWriter`, `RunConsole`)."""

    def write(self, step: int, metrics: StepMetrics) -> None: ...


class Driver:
    """Runs the loop over actors that are ready.

    Example:
        >>> driver = Driver(config, task, engines, learner, folder, observers=[metrics_writer])  # doctest: +SKIP
        >>> history = driver.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        engines: Sequence[Worker],
        learner: Worker,
        folder: RunFolder,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self._run = config.run
        self._block_size = config.rollout.block_size
        self._task = task
        self._scorer = RewardScorer(task)
        self._engines = engines
        self._learner = learner
        self._folder = folder
        self._observers = observers
        self._version = 0
        self._skipped_in_a_row = 0

    def train(self) -> list[StepMetrics]:
        """Trains for `run.num_steps` steps and saves the final model.

            task --PromptGroup--> engines --Trajectory--> scorer --> advantages --TrainingBatch--> learner
                                     ^                                                                |
                                     +----------------------- WeightSnapshot ------------------------+

        Every step waits for the one before: samples always come from the weights that they train (on-policy).

        Returns:
            The metrics of the evaluation before training and of every step, in order; each has its "step".

        Raises:
            WorkerError: an actor failed, died or hung.
            NoUsableSamplesError: `MAX_SKIPPED_STEPS` steps in a row had no usable sample.
        """
        history = [self._observe(0, self._evaluate())]
        for step in range(1, self._run.num_steps + 1):
            start = time.perf_counter()
            groups = self._task.train_groups(step - 1, self._run.prompts_per_step)
            samples = sample_groups(self._engines, groups, self._scorer)
            metrics = self._train_step(step, samples)
            metrics["time/step_s"] = time.perf_counter() - start
            if step == self._run.num_steps or _due(step, self._run.eval_every_steps):
                metrics |= self._evaluate()
            if _due(step, self._run.checkpoint_every_steps):
                self._save(step)
            history.append(self._observe(step, metrics))
        self._save()
        return history

    def _train_step(self, step: int, samples: Samples) -> StepMetrics:
        """One optimiser step and the push of its weights; the step is skipped if no sample is usable."""
        batch, num_lone = build_batch(samples.trajectories, self._version)
        metrics = sample_metrics(samples, self._block_size) | engine_metrics(engine_stats(self._engines))
        metrics["samples/dropped_lone"] = num_lone
        metrics["samples/prompts_skipped"] = self._task.num_skipped
        if batch is None:
            self._skip(step, metrics)
        else:
            self._skipped_in_a_row = 0
            metrics |= self._learner.call("train_step", batch)
            start = time.perf_counter()
            snapshot: WeightSnapshot = self._learner.call("publish")
            push_weights(self._engines, snapshot)
            self._version = snapshot.version
            metrics["time/push_s"] = time.perf_counter() - start
            metrics["weights/checksum"] = snapshot.checksum
        metrics["weights/version"] = self._version
        return metrics

    def _skip(self, step: int, metrics: StepMetrics) -> None:
        self._skipped_in_a_row += 1
        reasons = ", ".join(
            f"{name.removeprefix('samples/')} {value}" for name, value in metrics.items() if name.startswith("samples/")
        )
        logger.warning("Step %d is skipped: no group has two scored samples (%s).", step, reasons)
        if self._skipped_in_a_row == min(MAX_SKIPPED_STEPS, self._run.num_steps):
            raise NoUsableSamplesError(
                f"{self._skipped_in_a_row} steps in a row had no usable sample (the last: {reasons}); "
                "the first failure of each kind is in the log"
            )

    def _evaluate(self) -> StepMetrics:
        if not self._run.eval_prompts:
            return {}
        return evaluate(self._task, self._engines, self._scorer, self._run.eval_prompts)

    def _save(self, step: int | None = None) -> None:
        target = self._folder.final_dir if step is None else self._folder.checkpoint_dir(step)
        save_model(lambda path: self._learner.call("save_hf", path), target)

    def _observe(self, step: int, metrics: StepMetrics) -> StepMetrics:
        for observer in self._observers:
            observer.write(step, metrics)
        return {"step": step, **metrics}


def build_batch(trajectories: Sequence[Trajectory], weight_version: int) -> tuple[TrainingBatch | None, int]:
    """The batch of one optimiser step.

    Args:
        trajectories: scored.
        weight_version: the learner's.

    Returns:
        The batch, None if no group has two samples left, and the number of samples left out because they were alone
        in their group.
    """
    kept, num_lone = drop_lone_samples(trajectories)
    if not kept:
        return None, num_lone
    rewards = np.array([t.reward for t in kept], dtype=np.float32)
    advantages = group_advantages([t.group_id for t in kept], rewards)
    return TrainingBatch(trajectories=tuple(kept), advantages=advantages, weight_version=weight_version), num_lone


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
