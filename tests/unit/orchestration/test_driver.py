"""The loop's bookkeeping over real Ray actors of a few lines: no model, so that failures can be staged exactly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestration.config import RunConfig
from orchestration.contracts import PromptGroup, TrainingBatch, Trajectory, WeightSnapshot
from orchestration.driver import Driver, build_batch
from orchestration.errors import NoUsableSamplesError, WorkerError
from orchestration.placement import Bundle, reserved_cluster
from orchestration.run_folder import RunFolder
from orchestration.sampling import stream_trajectories
from orchestration.workers import Worker, push_weights, wait_until_ready
from rollout_workers.stats import EngineStats
from tests.helpers.samples import ListTask, make_trajectory

NUM_STEPS = 3


class ScriptedEngine:
    """Returns one fixed response per sample; `behaviour` says what goes wrong."""

    def __init__(self, behaviour: str = "") -> None:
        if behaviour == "bad start":
            raise ValueError("model.path: no such model")
        self._behaviour = behaviour
        self._version = 0

    def generate(self, groups: list[PromptGroup]) -> Iterator[Trajectory]:
        samples = [(group.group_id, i) for group in groups for i in range(group.num_samples)]
        if self._behaviour == "loses a sample":
            samples.pop()
        if self._behaviour == "repeats a sample":
            samples.append(samples[0])
        for number, (group_id, index) in enumerate(reversed(samples)):
            if number == 1 and self._behaviour == "dies":
                os._exit(1)
            if number == 1 and self._behaviour == "raises":
                raise RuntimeError("out of blocks")
            yield replace(make_trajectory(group_id, index, reward=None), weight_versions=(self._version,))

    def update_weights(self, snapshot: WeightSnapshot) -> None:
        if self._behaviour == "hangs in push":
            time.sleep(60)
        self._version = snapshot.version

    def stats(self) -> EngineStats:
        names = ("num_blocks", "blocks_in_use", "peak_blocks", "num_preemptions", "max_running", "generated_tokens")
        counters: dict[str, Any] = dict.fromkeys(names, 1)
        return EngineStats(
            **counters, mean_running=1.0, generate_seconds=1.0, kv_capacity_bytes=1, reserved_buffer_bytes=0
        )


class ScriptedLearner:
    """Counts steps, and refuses samples of other weights than its own."""

    def __init__(self) -> None:
        self._version = 0

    def train_step(self, batch: TrainingBatch) -> dict[str, float]:
        assert batch.weight_version == self._version
        assert {t.weight_versions for t in batch.trajectories} == {(self._version,)}
        return {"loss/total": float(np.abs(batch.advantages).sum()), "batch/sequences": len(batch.trajectories)}

    def publish(self) -> WeightSnapshot:
        self._version += 1
        return WeightSnapshot(version=self._version, checksum=f"checksum-{self._version}", buckets=())

    def save_hf(self, path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "version").write_text(str(self._version))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with reserved_cluster([Bundle(actor="test", num_cpus=0.1)]):
            yield


def start(actor_class: type, name: str, *args: Any) -> Worker:
    import ray

    return Worker(name, ray.remote(num_cpus=0)(actor_class).remote(*args))


def make_driver(tmp_path: Path, task: Any, engines: list[Worker], **run: Any) -> tuple[Driver, RunFolder]:
    settings = {"num_steps": NUM_STEPS, "prompts_per_step": 3, "eval_prompts": 2} | run
    config = RunConfig.model_validate({"run": settings, "model": {"path": "m"}, "task": {"type": "needle"}})
    folder = RunFolder.create(tmp_path, "test")
    return Driver(config, task, engines, start(ScriptedLearner, "learner"), folder), folder


def two_engines() -> list[Worker]:
    return [start(ScriptedEngine, "engine-0"), start(ScriptedEngine, "engine-1")]


GROUPS = [PromptGroup(group_id=f"g{i}", prompt_token_ids=(5,), num_samples=2) for i in range(5)]


def test_every_step_is_on_policy_and_accounted_for(tmp_path: Path) -> None:
    task = ListTask({0: 0.0, 1: 1.0})
    driver, folder = make_driver(tmp_path, task, two_engines(), checkpoint_every_steps=2, eval_every_steps=2)
    history = driver.train()
    assert [entry["step"] for entry in history] == [0, 1, 2, 3]
    assert [entry["step"] for entry in history if "eval/reward_mean" in entry] == [0, 2, 3]
    assert [entry["weights/version"] for entry in history[1:]] == [1, 2, 3]
    assert [entry["weights/checksum"] for entry in history[1:]] == ["checksum-1", "checksum-2", "checksum-3"]
    for entry in history[1:]:
        assert entry["samples/requested"] == entry["samples/scored"] == entry["batch/sequences"] == 6
        assert entry["reward/mean"] == 0.5
        assert entry["loss/total"] == pytest.approx(6, rel=1e-4)
    assert [path.name for path in folder.checkpoints_dir.iterdir()] == ["step-2"]
    assert (folder.checkpoint_dir(2) / "version").read_text() == "2"
    assert (folder.final_dir / "version").read_text() == "3"


def test_samples_without_reward_are_left_out(tmp_path: Path) -> None:
    task = ListTask({0: 0.0, 1: 1.0, 2: RuntimeError("broken"), 3: float("nan")})
    driver, _ = make_driver(tmp_path, task, two_engines(), eval_prompts=0, num_steps=1)
    evaluation, entry = driver.train()
    assert evaluation == {"step": 0}
    assert (entry["samples/requested"], entry["samples/scored"], entry["batch/sequences"]) == (12, 6, 6)
    assert (entry["samples/dropped_reward_error"], entry["samples/dropped_reward_nan"]) == (3, 3)


def test_steps_without_usable_samples_are_skipped_then_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = ListTask({0: 1.0, 1: RuntimeError("broken")})  # one scored sample per group: alone
    driver, _ = make_driver(tmp_path, task, two_engines(), num_steps=10)
    with pytest.raises(NoUsableSamplesError, match=r"3 steps in a row .*dropped_reward_error 3.*dropped_lone 3"):
        driver.train()
    assert caplog.text.count("is skipped: no group has two scored samples") == 3


def test_a_short_run_without_any_usable_sample_fails(tmp_path: Path) -> None:
    driver, _ = make_driver(tmp_path, ListTask({0: 1.0, 1: RuntimeError("broken")}), two_engines(), num_steps=2)
    with pytest.raises(NoUsableSamplesError, match="2 steps in a row"):
        driver.train()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies", "engine-1 died in generate"),
        ("raises", "engine-1 failed in generate: RuntimeError: out of blocks"),
        ("loses a sample", r"engine-1 returned no sample \('g3', 1\) \(1 missing\)"),
        ("repeats a sample", r"engine-1 returned a sample that it was not asked for, or twice: \('g1', 0\)"),
    ],
)
def test_failing_engine_is_named(behaviour: str, message: str) -> None:
    engines = [start(ScriptedEngine, "engine-0"), start(ScriptedEngine, "engine-1", behaviour)]
    with pytest.raises(WorkerError, match=message):
        list(stream_trajectories(engines, GROUPS))


def test_groups_are_dealt_round_robin_and_streamed() -> None:
    got = {(t.group_id, t.sample_index) for t in stream_trajectories(two_engines(), GROUPS)}
    assert got == {(group.group_id, i) for group in GROUPS for i in range(2)}


def test_more_engines_than_groups() -> None:
    assert len(list(stream_trajectories(two_engines(), GROUPS[:1]))) == 2


def test_push_that_hangs_names_the_engine() -> None:
    engines = [start(ScriptedEngine, "engine-0"), start(ScriptedEngine, "engine-1", "hangs in push")]
    wait_until_ready(engines)
    snapshot = WeightSnapshot(version=4, checksum="", buckets=())
    with pytest.raises(WorkerError, match=r"engine-1 did not finish update_weights to version 4 within 0\.5 s"):
        push_weights(engines, snapshot, timeout_s=0.5)


def test_actor_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkerError, match=r"engine-0 died in its start: ValueError: model\.path: no such model"):
        wait_until_ready([start(ScriptedEngine, "engine-0", "bad start")])


def test_batch_keeps_groups_and_drops_lone_samples() -> None:
    trajectories = [make_trajectory("a", i, reward=float(i)) for i in range(2)] + [make_trajectory("b", 0)]
    batch, num_lone = build_batch(trajectories, weight_version=7)
    assert batch is not None
    assert (len(batch.trajectories), num_lone, batch.weight_version) == (2, 1, 7)
    np.testing.assert_allclose(batch.advantages, [-1, 1], rtol=1e-5)
    assert build_batch(trajectories[2:], weight_version=7) == (None, 1)
