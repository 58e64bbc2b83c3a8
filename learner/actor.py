"""The learner as a Ray actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from learner.config import LearnerConfig
from learner.environment import single_rank_environment
from orchestration.contracts import TrainingBatch, Trajectory, WeightSnapshot

if TYPE_CHECKING:
    from learner.engine import Learner


def actor_options(config: LearnerConfig) -> dict[str, Any]:
    """What `ray.remote(LearnerActor).options(**...)` needs: resources, and the environment from the process's start.

    No restart: a restarted learner would silently train from the weights of step 0.
    """
    return {
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": single_rank_environment(config)},
    }


class LearnerActor:
    """`Learner` behind Ray: the same methods; `publish` leaves the weights in the object store.

    Args: see `Learner`.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, *, seed: int = 0, total_steps: int | None = None
    ) -> None:
        # Here, so that the driver, which imports this module too, does not load DeepSpeed.
        from learner.engine import Learner

        self._learner: Learner = Learner(model_path, config, seed=seed, total_steps=total_steps)

    def train_step(self, batch: TrainingBatch) -> dict[str, float]:
        return self._learner.train_step(batch)

    def publish(self) -> WeightSnapshot:
        """A snapshot whose buckets are object references: each bucket is put as soon as it is packed, so this process
        holds one bucket at a time."""
        import ray

        return self._learner.publish(store=ray.put)

    def weight_version(self) -> int:
        return self._learner.weight_version

    def score(self, trajectories: Sequence[Trajectory], masked: bool = True) -> list[np.ndarray]:
        return self._learner.score(trajectories, masked=masked)

    def save_hf(self, path: str) -> None:
        self._learner.save_hf(path)

    def weights_checksum(self) -> str:
        return self._learner.weights_checksum()
