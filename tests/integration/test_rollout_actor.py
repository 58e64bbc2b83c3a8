"""The engine as a Ray actor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray

from kv_policies.config import SnapKVConfig
from rollout_workers.actor import RolloutActor, actor_options
from rollout_workers.config import RolloutConfig, SamplingConfig
from tests.helpers.reference import load_reference, max_delta, replay
from tests.helpers.rollout import TOLERANCE, make_snapshot, prompt_groups
from tests.helpers.tiny_models import randomize

ROLLOUT = RolloutConfig(max_model_len=512, kv_cache_bytes=16 << 20, max_num_seqs=2)


@pytest.fixture(scope="module")
def actor(qwen3_gqa, ray_cluster):
    return (
        ray.remote(RolloutActor)
        .options(**actor_options(ROLLOUT))
        .remote(
            str(qwen3_gqa),
            policy=SnapKVConfig(budget_tokens=32, window_tokens=8),
            rollout=ROLLOUT,
            sampling=SamplingConfig(max_response_tokens=100),
            name="engine-3",
        )
    )


def test_streams_trajectories_and_answers_in_between(actor, qwen3_gqa) -> None:
    groups = prompt_groups((40, 60, 80, 90))
    generation = actor.generate.remote(groups)
    first = ray.get(next(generation))
    stats = ray.get(actor.stats.remote())  # answered while the others are sampled
    ray.get(actor.abort.remote([groups[3].group_id]))
    trajectories = [first, *(ray.get(reference) for reference in generation)]
    assert stats.generated_tokens < sum(len(t.response_token_ids) for t in trajectories)
    assert len(trajectories) == 8
    assert {t.finish_reason for t in trajectories if t.group_id == groups[3].group_id} == {"abort"}
    model = load_reference(qwen3_gqa)
    assert max(max_delta(t, replay(model, t)) for t in trajectories if t.response_token_ids) <= TOLERANCE
    assert ray.get(actor.stats.remote()).blocks_in_use == 0


def test_takes_weights_from_the_object_store(actor, qwen3_gqa) -> None:
    model = load_reference(qwen3_gqa)
    randomize(model, seed=3)
    snapshot = make_snapshot(model, version=4)
    by_reference = replace(snapshot, buckets=tuple(ray.put(bucket) for bucket in snapshot.buckets))
    ray.get(actor.update_weights.remote(by_reference))
    assert ray.get(actor.weight_version.remote()) == 4
    trajectories = [ray.get(reference) for reference in actor.generate.remote(prompt_groups((50,)))]
    assert {t.weight_versions for t in trajectories} == {(4,)}
    assert max(max_delta(t, replay(model, t)) for t in trajectories) <= TOLERANCE


def test_errors_name_the_engine(actor, qwen3_gqa) -> None:
    snapshot = make_snapshot(load_reference(qwen3_gqa), version=5)
    bad = replace(snapshot, buckets=(ray.put(replace(snapshot.buckets[0], checksum="00")), *snapshot.buckets[1:]))
    with pytest.raises(ValueError, match="engine-3: weights version 5: bucket 0: checksum"):
        ray.get(actor.update_weights.remote(bad))
    with pytest.raises(ValueError, match="engine-3: group P600-0: prompt_token_ids"):
        list(map(ray.get, actor.generate.remote(prompt_groups((600,)))))
    assert ray.get(actor.weight_version.remote()) == 4
