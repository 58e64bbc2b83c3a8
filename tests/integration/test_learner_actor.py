"""The learner as a Ray actor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import ray

from learner.actor import LearnerActor, actor_options
from learner.config import LearnerConfig
from orchestration.contracts import TrainingBatch, WeightBucket
from tests.helpers.masked import mixed_trajectories, with_logprobs
from tests.helpers.reference import load_reference, replay

CONFIG = LearnerConfig(zero_stage=2, weight_bucket_bytes=500_000)


@pytest.fixture(scope="module")
def actor(llama_mha_tied, ray_cluster):
    return ray.remote(LearnerActor).options(**actor_options(CONFIG)).remote(str(llama_mha_tied), CONFIG)


def test_trains_and_publishes_references(actor, llama_mha_tied):
    """The learner's whole life as the driver sees it: score, step, publish."""
    reference = load_reference(llama_mha_tied)
    trajectories = mixed_trajectories(llama_mha_tied)
    scores = ray.get(actor.score.remote(trajectories))
    assert max(np.abs(s - replay(reference, t)).max() for s, t in zip(scores, trajectories, strict=True)) < 2e-5

    before = ray.get(actor.weights_checksum.remote())
    trajectories = with_logprobs(trajectories, scores)
    batch = TrainingBatch(
        trajectories=tuple(trajectories), advantages=np.ones(len(trajectories), np.float32), weight_version=0
    )
    metrics = ray.get(actor.train_step.remote(batch))
    assert metrics["mismatch/masked_max"] < 1e-6

    snapshot = ray.get(actor.publish.remote())
    assert snapshot.version == ray.get(actor.weight_version.remote()) == 1
    assert snapshot.checksum == ray.get(actor.weights_checksum.remote()) != before
    assert len(snapshot.buckets) > 1 and all(isinstance(ref, ray.ObjectRef) for ref in snapshot.buckets)
    buckets = [ray.get(ref) for ref in snapshot.buckets]
    assert all(isinstance(bucket, WeightBucket) for bucket in buckets)
    names = [name for bucket in buckets for name in bucket.names]
    assert names == [name for name, _ in reference.named_parameters()]


def test_errors_travel(actor, llama_mha_tied):
    trajectory = mixed_trajectories(llama_mha_tied)[0]
    wrong = replace(trajectory, prompt_token_ids=(10_000, *trajectory.prompt_token_ids[1:]))
    with pytest.raises(ValueError, match=r"expected below 512 .* got 10000"):
        ray.get(actor.score.remote([wrong]))


def test_saves_through_the_actor(actor, tmp_path):
    ray.get(actor.save_hf.remote(str(tmp_path / "final")))
    assert {"config.json", "model.safetensors"} <= {entry.name for entry in (tmp_path / "final").iterdir()}
