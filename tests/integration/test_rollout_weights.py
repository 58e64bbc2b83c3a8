"""Weight pushes into a running engine: the new weights serve, or the old ones do and the error says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_policies.config import DenseConfig, SnapKVConfig
from orchestration.contracts import WeightSnapshot
from tests.helpers.reference import load_reference, max_delta, replay
from tests.helpers.rollout import (
    TOLERANCE,
    combined_checksum,
    make_bucket,
    make_snapshot,
    prompt_groups,
    rollout_engine,
)
from tests.helpers.tiny_models import randomize

GROUPS = prompt_groups((5, 60, 90), num_samples=1)
SNAPKV = SnapKVConfig(budget_tokens=32, window_tokens=8)
CASES = {
    "untied-snapkv": ({"architecture": "qwen3", "num_kv_heads": 2}, SNAPKV),
    "tied-snapkv": ({"architecture": "llama", "num_kv_heads": 4, "tied": True}, SNAPKV),
    "tied-dense": ({"architecture": "qwen3", "num_kv_heads": 4, "tied": True}, DenseConfig()),
}


def worst(model, trajectories) -> float:
    return max(max_delta(trajectory, replay(model, trajectory)) for trajectory in trajectories)


@pytest.mark.parametrize("case", CASES)
def test_new_weights_serve_after_a_push(tiny_model, case: str) -> None:
    options, policy = CASES[case]
    path = tiny_model(**options)
    old, new = load_reference(path), load_reference(path)
    with rollout_engine(path, policy) as engine:
        assert worst(old, engine.generate(GROUPS)) <= TOLERANCE
        for version in (1, 2):  # a second push starts from what the first one left
            randomize(new, seed=version)
            engine.update_weights(make_snapshot(new, version=version))
            trajectories = list(engine.generate(GROUPS))
            assert {t.weight_versions for t in trajectories} == {(version,)}
            assert engine.weight_version == version
            assert worst(new, trajectories) <= TOLERANCE
            assert worst(old, trajectories) > 1.0
            assert worst(stale_output_layer(old, new), trajectories) > 0.1, "the output layer is the old one"


def stale_output_layer(old, new):
    """The new model with the old output layer: what an update that misses a tied layer would serve."""
    mixed = type(new)(new.config).eval()
    mixed.load_state_dict(new.state_dict())
    mixed.lm_head.weight = type(new.lm_head.weight)(old.lm_head.weight.detach().clone())
    return mixed


@pytest.fixture(scope="module")
def engine(qwen3_gqa):
    with rollout_engine(qwen3_gqa, SNAPKV, max_num_seqs=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(qwen3_gqa):
    return load_reference(qwen3_gqa)


@pytest.fixture
def snapshot(qwen3_gqa) -> WeightSnapshot:
    changed = load_reference(qwen3_gqa)
    randomize(changed, seed=9)
    return make_snapshot(changed, version=7)


def with_bucket(snapshot: WeightSnapshot, index: int, bucket) -> WeightSnapshot:
    buckets = (*snapshot.buckets[:index], bucket, *snapshot.buckets[index + 1 :])
    return replace(snapshot, buckets=buckets, checksum=combined_checksum(buckets))


def flipped(bucket):
    data = bucket.data.copy()
    data[5] ^= 1
    return replace(bucket, data=data)


def renamed(bucket):
    return replace(bucket, names=("model.layers.0.unheard_of.weight", *bucket.names[1:]))


def reshaped(bucket):
    return replace(bucket, shapes=(bucket.shapes[0][::-1], *bucket.shapes[1:]))


def mislabelled(bucket):
    return replace(bucket, dtypes=("bfloat16", *bucket.dtypes[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flipped, r"engine-0: weights version 7: bucket 2: checksum: expected .*nothing was loaded"),
        (renamed, r"bucket 2: model.layers.0.unheard_of.weight: unknown parameter"),
        (reshaped, r"bucket 2: .*: expected shape \[.*\], got \[.*\]"),
        (lambda bucket: make_bucket([]), r"engine-0: weights version 7: \d missing parameters: model\."),
        (mislabelled, r"bucket 2: data: expected \d+ bytes"),
        (lambda bucket: "not a bucket", r"WeightSnapshot.buckets: expected WeightBuckets, got str"),
    ],
    ids=["flipped-bit", "unknown-name", "wrong-shape", "missing", "wrong-size", "not-a-bucket"],
)
def test_a_bad_snapshot_is_refused_and_the_old_weights_serve(engine, model, snapshot, change, message: str) -> None:
    index = next(i for i, b in enumerate(snapshot.buckets) if i >= 2 and len(set(b.shapes[0])) == 2)
    bad = with_bucket(snapshot, index, change(snapshot.buckets[index]))
    with pytest.raises(ValueError, match=message.replace("bucket 2", f"bucket {index}")):
        engine.update_weights(bad)
    assert engine.weight_version == 0
    assert worst(model, engine.generate(GROUPS)) <= TOLERANCE


def test_buckets_of_two_snapshots_are_refused(engine, model, snapshot) -> None:
    mixed = replace(snapshot, buckets=(make_snapshot(model, version=0).buckets[0], *snapshot.buckets[1:]))
    with pytest.raises(ValueError, match="engine-0: weights version 7: checksum over all buckets: expected"):
        engine.update_weights(mixed)


def test_refused_while_requests_are_in_flight(engine, model, snapshot) -> None:
    generation = engine.generate(GROUPS)
    first = next(generation)
    with pytest.raises(RuntimeError, match="engine-0: update_weights: expected no request in flight, got 2"):
        engine.update_weights(snapshot)
    assert worst(model, [first, *generation]) <= TOLERANCE


def test_a_push_forgets_cached_prompts(qwen3_gqa, snapshot) -> None:
    changed = load_reference(qwen3_gqa)
    randomize(changed, seed=9)
    groups = prompt_groups((200,), num_samples=2)
    with rollout_engine(qwen3_gqa, DenseConfig()) as engine:
        list(engine.generate(groups))  # leaves six whole blocks in vLLM's prefix cache
        engine.update_weights(snapshot)
        assert worst(changed, engine.generate(groups)) <= TOLERANCE


def test_bfloat16_engine_takes_float32_weights(qwen3_gqa, snapshot) -> None:
    changed = load_reference(qwen3_gqa)
    randomize(changed, seed=9)
    with rollout_engine(qwen3_gqa, SNAPKV, dtype="bfloat16") as engine:
        engine.update_weights(snapshot)
        trajectories = list(engine.generate(GROUPS))
    deltas = np.concatenate([np.abs(t.logprobs - replay(changed, t)) for t in trajectories])
    assert deltas.mean() < 0.2  # the precision of the engine, not of the mask
