"""The driver's side of the actors: starts them, calls them, and names the one that failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestration.config import RunConfig
from orchestration.contracts import WeightSnapshot
from orchestration.errors import WorkerError

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

    from rollout_workers.stats import EngineStats

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 600.0
"""A weight push that takes longer means an engine that hangs."""


@dataclass(frozen=True)
class Worker:
    """A Ray actor with a name for people."""

    name: str
    actor: ActorHandle

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method and waits.

        Raises:
            WorkerError: the actor raised or is dead.
        """
        return self.wait(getattr(self.actor, method).remote(*args), method)

    def wait(self, reference: Any, doing: str) -> Any:
        """Waits for a result of this actor; raises like `call`."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{self.name} failed in {doing}: {_last_line(error)}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"{self.name} died in {doing}: {_reason(error)}") from error


def start_engines(config: RunConfig, model_path: str, group: PlacementGroup, first_bundle: int) -> tuple[Worker, ...]:
    """Starts the rollout actors, engine i in bundle `first_bundle` + i; does not wait for them."""
    from rollout_workers.actor import RolloutActor, actor_options

    return tuple(
        Worker(
            f"engine-{i}",
            _placed(RolloutActor, actor_options(config.rollout), group, first_bundle + i).remote(
                model_path,
                policy=config.policy,
                rollout=config.rollout,
                sampling=config.sampling,
                name=f"engine-{i}",
            ),
        )
        for i in range(config.rollout.num_engines)
    )


def start_learner(config: RunConfig, model_path: str, group: PlacementGroup, bundle: int) -> Worker:
    """Starts the learner actor in a bundle; does not wait for it."""
    from learner.actor import LearnerActor, actor_options

    actor_class = _placed(LearnerActor, actor_options(config.learner), group, bundle)
    return Worker(
        "learner",
        actor_class.remote(model_path, config.learner, seed=config.run.seed, total_steps=config.run.num_steps),
    )


def wait_until_ready(workers: Sequence[Worker]) -> None:
    """Waits for all constructors; raises `WorkerError` for the first that failed."""
    for worker in workers:
        worker.wait(worker.actor.__ray_ready__.remote(), "its start")


def push_weights(engines: Sequence[Worker], snapshot: WeightSnapshot, timeout_s: float = PUSH_TIMEOUT_S) -> None:
    """Loads a snapshot into every engine, all at once.

    Raises:
        WorkerError: an engine failed or did not finish in time.
    """
    import ray

    doing = f"update_weights to version {snapshot.version}"
    references: list[Any] = [engine.actor.update_weights.remote(snapshot) for engine in engines]
    _, late = ray.wait(references, num_returns=len(references), timeout=timeout_s)
    for engine, reference in zip(engines, references, strict=True):
        if reference in late:
            raise WorkerError(f"{engine.name} did not finish {doing} within {timeout_s:g} s")
        engine.wait(reference, doing)


def engine_stats(engines: Sequence[Worker]) -> list[EngineStats]:
    """The statistics of all engines."""
    references: list[Any] = [engine.actor.stats.remote() for engine in engines]
    return [engine.wait(reference, "stats") for engine, reference in zip(engines, references, strict=True)]


def _placed(actor_class: type, options: dict[str, Any], group: PlacementGroup, bundle: int) -> Any:
    """The class as a Ray actor class that starts in one bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(actor_class).options(scheduling_strategy=strategy, **options)


def _last_line(error: Exception) -> str:
    """Ray puts the remote traceback into the message; its last line is the exception itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _reason(error: Exception) -> str:
    """Why an actor is dead: the exception of its constructor, or what Ray says about its process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "creation task" in lines[0]:
        return lines[-1]
    reason = next((line for line in lines if line.startswith("The actor is dead")), lines[0])
    return reason.partition(" Some common causes")[0]
