"""metrics.jsonl and TensorBoard get the same numbers; what is not finite stays valid JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from orchestration import metrics
from orchestration.contracts import KVStats
from orchestration.metrics import MetricsWriter, engine_metrics, sample_metrics
from orchestration.sampling import Samples
from orchestration.scoring import SampleCounts
from rollout_workers.stats import EngineStats
from tests.helpers.samples import make_trajectory

STATS = EngineStats(
    num_blocks=10,
    blocks_in_use=0,
    peak_blocks=8,
    num_preemptions=2,
    max_running=4,
    mean_running=3.5,
    generated_tokens=100,
    generate_seconds=2.0,
    kv_capacity_bytes=1 << 20,
    reserved_buffer_bytes=0,
)


def test_both_files_hold_the_same_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        writer.write(0, {"eval/reward_mean": 0.5})
        writer.write(1, {"loss/total": 1.25, "samples/scored": 8, "weights/checksum": "ab", "policy/entropy": math.nan})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "eval/reward_mean": 0.5},
        {"step": 1, "loss/total": 1.25, "samples/scored": 8, "weights/checksum": "ab", "policy/entropy": None},
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "weights/checksum" not in events.Tags()["tensors"]
    for name, step, value in (("eval/reward_mean", 0, 0.5), ("loss/total", 1, 1.25), ("samples/scored", 1, 8)):
        (event,) = events.Tensors(name)
        assert (event.step, float(make_ndarray(event.tensor_proto))) == (step, value)


def test_every_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        writer.write(1, {"a": 1})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1}\n'


def test_sample_metrics() -> None:
    samples = Samples(
        trajectories=[
            make_trajectory(sample_index=0, reward=0.0),
            make_trajectory(
                sample_index=1,
                reward=1.0,
                finish_reason="length",
                kv=KVStats(context_tokens=3, context_kept=1, peak_blocks=3, final_blocks=2),
            ),
        ],
        counts=SampleCounts(requested=4, scored=2, dropped_reward_error=1, aborted=1, truncated=1),
        seconds=2.0,
    )
    got = sample_metrics(samples, block_size=4)
    assert got == {
        "samples/requested": 4,
        "samples/scored": 2,
        "samples/dropped_reward_error": 1,
        "samples/dropped_reward_nan": 0,
        "samples/aborted": 1,
        "samples/truncated": 1,
        "time/rollout_s": 2.0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "rollout/response_tokens": 4,
        "rollout/tokens_per_s": 2.0,
        "rollout/response_length_mean": 2.0,
        "rollout/truncated_fraction": 0.5,
        "rollout/retained_fraction": pytest.approx(0.5),
        "rollout/sample_final_blocks": 1.5,
        "rollout/sample_dense_blocks": 2.0,
    }


def test_without_a_scored_sample_only_counts_remain() -> None:
    got = sample_metrics(Samples(trajectories=[], counts=SampleCounts(requested=2, aborted=2), seconds=1.0), 4)
    assert got["samples/aborted"] == 2
    assert not [name for name in got if name.startswith(("reward/", "rollout/"))]


def test_engine_metrics() -> None:
    assert engine_metrics([STATS, STATS]) == {
        "rollout/num_blocks": 10,
        "rollout/peak_blocks": 8,
        "rollout/preemptions": 4,
        "rollout/max_running": 4,
    }


def test_every_name_is_documented() -> None:
    samples = Samples(trajectories=[make_trajectory()], counts=SampleCounts(requested=1, scored=1), seconds=1.0)
    assert metrics.__doc__ is not None
    for name in sample_metrics(samples, 4) | engine_metrics([STATS]):
        group, _, leaf = name.partition("/")
        documented = name in metrics.__doc__ or any(
            line.startswith(f"| {group}/{{") and leaf in line for line in metrics.__doc__.splitlines()
        )
        assert documented, name
