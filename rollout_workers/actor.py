"""The engine as a Ray actor. Importing this module imports neither vLLM nor torch."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ray import ObjectRef, get

from kv_policies.config import PolicyConfig
from orchestration.contracts import PromptGroup, Trajectory, WeightSnapshot
from rollout_workers.config import RolloutConfig, SamplingConfig
from rollout_workers.environment import engine_environment
from rollout_workers.stats import EngineStats

if TYPE_CHECKING:
    from rollout_workers.engine import RolloutEngine

_NUM_THREADS = 4
"""One to sample, the others for calls that come meanwhile."""


class RolloutActor:
    """`RolloutEngine` for `ray.remote(RolloutActor).options(**actor_options(rollout))`.

    The actor has several threads, so that `abort` and `stats` answer while `generate` runs. The other methods exclude
    each other: an update of the weights waits for the samples in flight. Wait for a call before one that depends on it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        policy: PolicyConfig,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        name: str = "engine-0",
    ) -> None:
        from rollout_workers.engine import RolloutEngine

        self._one_at_a_time = threading.Lock()
        self._engine: RolloutEngine = RolloutEngine(
            model_path, policy=policy, rollout=rollout, sampling=sampling, name=name
        )

    def generate(self, groups: Sequence[PromptGroup]) -> Iterator[Trajectory]:
        """See `RolloutEngine.generate`; the caller gets a streaming generator of object references."""
        with self._one_at_a_time, closing(self._engine.generate(groups)) as trajectories:
            # Not `yield from`: Ray sends values into a streaming generator, which are none of the engine's business.
            for trajectory in trajectories:  # noqa: UP028
                yield trajectory

    def update_weights(self, snapshot: WeightSnapshot) -> None:
        """See `RolloutEngine.update_weights`; buckets may be object references and are fetched one at a time."""
        with self._one_at_a_time:
            self._engine.update_weights(snapshot, fetch=_fetch)

    def weight_version(self) -> int:
        """See `RolloutEngine.weight_version`."""
        return self._engine.weight_version

    def abort(self, group_ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        self._engine.abort(group_ids)

    def stats(self) -> EngineStats:
        """See `RolloutEngine.stats`."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        with self._one_at_a_time:
            self._engine.shutdown()


def actor_options(rollout: RolloutConfig) -> dict[str, Any]:
    """Options of the actor: its resources, and the environment that an engine needs before it imports torch."""
    return {
        "num_cpus": rollout.num_cpus_per_engine,
        "num_gpus": rollout.num_gpus_per_engine,
        "max_concurrency": _NUM_THREADS,
        "runtime_env": {"env_vars": engine_environment(rollout)},
        # A restarted engine would have the weights of the start: the driver must know and push again.
        "max_restarts": 0,
    }


def _fetch(entry: Any) -> Any:
    return get(entry) if isinstance(entry, ObjectRef) else entry
