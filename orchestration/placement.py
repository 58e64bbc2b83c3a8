"""Where actors run: explicit resources, one bundle per actor, on a private local Ray or on a cluster that exists."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestration.config import RunConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 2 * 2**30
"""Of a local Ray: room for two weight snapshots of a small model and the samples in flight."""
_EXISTING_CLUSTER_TIMEOUT_S = 300.0
"""How long a cluster may take to make room: an autoscaler needs minutes to add a node."""
_WAIT_S = 5


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The resources of one actor.

    Example:
        >>> Bundle(actor="engine-0", num_cpus=0.5).resources
        {'CPU': 0.5}
    """

    actor: str
    num_cpus: float
    num_gpus: float = 0

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them; zeros left out."""
        return {name: n for name, n in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if n}


def plan_bundles(config: RunConfig, *, with_learner: bool = True) -> tuple[Bundle, ...]:
    """One bundle per actor, the learner first."""
    rollout = config.rollout
    engines = tuple(
        Bundle(actor=f"engine-{i}", num_cpus=rollout.num_cpus_per_engine, num_gpus=rollout.num_gpus_per_engine)
        for i in range(rollout.num_engines)
    )
    if not with_learner:
        return engines
    return (Bundle(actor="learner", num_cpus=config.learner.num_cpus, num_gpus=config.learner.num_gpus), *engines)


@contextlib.contextmanager
def reserved_cluster(bundles: Sequence[Bundle], *, log_dir: Path | None = None) -> Iterator[PlacementGroup]:
    """Connects to Ray and reserves the bundles.

    With RAY_ADDRESS set (inside `ray job submit`, for example) that cluster is used and left running. Without it a
    private Ray is started on this machine and stopped at the end; it writes nothing outside a temporary folder, and
    what its workers printed is copied to `log_dir` if that is given.

    Raises:
        ValueError: the resources do not exist: says what was asked and what there is.
    """
    with _existing_cluster() if os.environ.get("RAY_ADDRESS") else private_cluster(log_dir):
        # Not removed at the end: it goes with this process's connection, and a request to a Ray that is being
        # terminated by the same signal as this process would hang.
        yield _reserve(bundles)


def accelerators() -> list[str]:
    """Types of accelerator in the cluster that this process is connected to, as Ray names them."""
    import ray

    prefix = "accelerator_type:"
    return sorted(name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix))


@contextlib.contextmanager
def _existing_cluster() -> Iterator[None]:
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def private_cluster(log_dir: Path | None = None) -> Iterator[None]:
    """A Ray of this machine's CPUs and of this process alone; worker logs are copied to `log_dir` at the end."""
    import ray

    _keep_token_out_of_home()
    # Ray puts its Unix sockets below this folder, and a socket's path has at most 107 bytes: so not the run folder.
    root = Path(tempfile.mkdtemp(prefix="penumbra-"))
    try:
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(root),
        )
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        if log_dir is not None:
            _copy_worker_logs(root / "session_latest" / "logs", log_dir)
        shutil.rmtree(root, ignore_errors=True)


def _keep_token_out_of_home() -> None:
    """Gives Ray a token in this process's environment, before it writes one to ~/.ray, where it would bind every later
    cluster of the user. It stays set, because Ray caches it for as long as the process lives."""
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _copy_worker_logs(session_logs: Path, log_dir: Path) -> None:
    """Keeps what the actors wrote; Ray's own logs are of no use once it is gone."""
    if not session_logs.is_dir():
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    for path in (*session_logs.glob("worker-*.out"), *session_logs.glob("worker-*.err")):
        if path.stat().st_size:
            shutil.copy(path, log_dir / path.name)


def _reserve(bundles: Sequence[Bundle]) -> PlacementGroup:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not os.environ.get("RAY_ADDRESS"):
        _check_fits(bundles, ray.cluster_resources())
    group = placement_group([bundle.resources for bundle in bundles], strategy="PACK")
    deadline = time.monotonic() + _EXISTING_CLUSTER_TIMEOUT_S
    if not group.wait(_WAIT_S):
        logger.warning("Waiting for the cluster: %s.", _asked_and_available(bundles, ray.cluster_resources()))
        while not group.wait(_WAIT_S):  # in slices, because a signal is not handled inside of one
            if time.monotonic() > deadline:
                remove_placement_group(group)
                raise ValueError(
                    f"The cluster made no room within {_EXISTING_CLUSTER_TIMEOUT_S:.0f} s: "
                    f"{_asked_and_available(bundles, ray.cluster_resources())}"
                )
    return group


def _check_fits(bundles: Sequence[Bundle], available: dict[str, float]) -> None:
    """Refuses at once what a machine that cannot grow will never have."""
    for name, asked in _total(bundles).items():
        if asked > available.get(name, 0):
            raise ValueError(f"Not enough {name}s: {_asked_and_available(bundles, available)}")


def _total(bundles: Sequence[Bundle]) -> dict[str, float]:
    total = {name: sum(bundle.resources.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
    return {name: number for name, number in total.items() if number}


def _asked_and_available(bundles: Sequence[Bundle], available: dict[str, float]) -> str:
    total = ", ".join(f"{n:g} {name}" for name, n in _total(bundles).items())
    each = "; ".join(
        f"{bundle.actor}: " + ", ".join(f"{n:g} {name}" for name, n in bundle.resources.items()) for bundle in bundles
    )
    there = ", ".join(f"{available.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"asked for {total} ({each}), there is {there}"
