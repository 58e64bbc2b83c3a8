"""The engine as a Ray actor. Importing this module imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ray import ObjectRef, get, method

from kv_policies.config import PolicyConfig
from orchestration.contracts import PromptGroup, Trajectory, WeightSnapshot
from rollout_workers.config import RolloutConfig, SamplingConfig
from rollout_workers.environment import engine_environment
from rollout_workers.stats import EngineStats

if TYPE_CHECKING:
    from rollout_workers.engine import RolloutEngine

_CONTROL = "control"


class RolloutActor:
    """`RolloutEngine` for `ray.remote(RolloutActor).options(**actor_options(rollout))`.

    Calls run one after another, so an update of the weights waits for the samples in flight. `abort` and `stats` have a
    thread of their own and answer while `generate` runs.
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

        self._engine: RolloutEngine = RolloutEngine(
            model_path, policy=policy, rollout=rollout, sampling=sampling, name=name
        )

    def generate(self, groups: Sequence[PromptGroup]) -> Iterator[Trajectory]:
        """See `RolloutEngine.generate`; the caller gets a streaming generator of object references."""
        yield from self._engine.generate(groups)

    def update_weights(self, snapshot: WeightSnapshot) -> None:
        """See `RolloutEngine.update_weights`; buckets may be object references and are fetched one at a time."""
        self._engine.update_weights(snapshot, fetch=_fetch)

    def weight_version(self) -> int:
        """See `RolloutEngine.weight_version`."""
        return self._engine.weight_version

    @method(concurrency_group=_CONTROL)
    def abort(self, group_ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        self._engine.abort(group_ids)

    @method(concurrency_group=_CONTROL)
    def stats(self) -> EngineStats:
        """See `RolloutEngine.stats`."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        self._engine.shutdown()


def actor_options(rollout: RolloutConfig) -> dict[str, Any]:
    """Options of the actor: its resources, and the environment that an engine needs before it imports torch."""
    return {
        "num_cpus": rollout.num_cpus_per_engine,
        "num_gpus": rollout.num_gpus_per_engine,
        "concurrency_groups": {_CONTROL: 1},
        "runtime_env": {"env_vars": engine_environment(rollout)},
        # A restarted engine would have the weights of the start: the driver must know and push again.
        "max_restarts": 0,
    }


def _fetch(entry: Any) -> Any:
    return get(entry) if isinstance(entry, ObjectRef) else entry
