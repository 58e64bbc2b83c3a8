"""Resources are explicit, and what cannot be had is said before anything waits. One private Ray for the module."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.config import load_config
from orchestration.placement import Bundle, plan_bundles, reserved_cluster

CONFIG = """
[model]
path = "model"
[task]
type = "needle"
[learner]
num_cpus = 1
num_gpus = 2
[rollout]
num_engines = 2
num_cpus_per_engine = 0.25
"""


def test_plan(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config([tmp_path / "run.toml"])
    engines = (Bundle(actor="engine-0", num_cpus=0.25), Bundle(actor="engine-1", num_cpus=0.25))
    assert plan_bundles(config) == (Bundle(actor="learner", num_cpus=1, num_gpus=2), *engines)
    assert plan_bundles(config, with_learner=False) == engines
    assert plan_bundles(config)[0].resources == {"CPU": 1, "GPU": 2}


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No cluster to connect to, and a home folder of its own."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def speak() -> None:
    print("a line of an actor", flush=True)


def test_private_cluster_leaves_only_the_logs(no_cluster: Path) -> None:
    import ray

    logs = no_cluster / "logs"
    with reserved_cluster([Bundle(actor="a", num_cpus=0.5), Bundle(actor="b", num_cpus=0.5)], log_dir=logs) as group:
        assert group.bundle_count == 2
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        ray.get(ray.remote(num_cpus=0)(speak).remote())
    assert not ray.is_initialized()
    assert not session.exists()
    assert any("a line of an actor" in path.read_text() for path in logs.iterdir())
    assert not (no_cluster / "home").exists()


def test_more_than_there_is(no_cluster: Path) -> None:
    import ray

    bundles = [Bundle(actor="learner", num_cpus=0.5, num_gpus=64), Bundle(actor="engine-0", num_cpus=0.5)]
    message = r"Not enough GPUs: asked for 1 CPU, 64 GPU \(learner: 0.5 CPU, 64 GPU; engine-0: 0.5 CPU\), there is "
    with pytest.raises(ValueError, match=message), reserved_cluster(bundles):
        pass
    assert not ray.is_initialized()
