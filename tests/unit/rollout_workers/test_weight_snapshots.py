"""Snapshots on the engine's side: verified one bucket at a time, decoded exactly."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchestration.contracts import WeightSnapshot
from rollout_workers.weights import expected_shapes, iterate_weights, verify_snapshot
from tests.helpers.rollout import combined_checksum, make_bucket, make_snapshot
from tests.helpers.tiny_models import build_tiny_model

EXPECTED = {"a": (2, 3), "b": (4,), "c": (1,)}
A, B, C = (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1 for shape in EXPECTED.values())


def snapshot_of(*buckets) -> WeightSnapshot:
    return WeightSnapshot(version=3, checksum=combined_checksum(buckets), buckets=buckets)


def verify(snapshot: WeightSnapshot) -> None:
    verify_snapshot(snapshot, EXPECTED, lambda bucket: bucket, "engine-1")


def test_accepts_any_split_and_order() -> None:
    verify(snapshot_of(make_bucket([("a", A), ("b", B), ("c", C)])))
    verify(snapshot_of(make_bucket([("c", C)]), make_bucket([("b", B), ("a", A)])))


def test_fetches_one_bucket_at_a_time() -> None:
    buckets = [make_bucket([("a", A)]), make_bucket([("b", B), ("c", C)])]
    fetched = []
    snapshot = WeightSnapshot(version=3, checksum=combined_checksum(buckets), buckets=(0, 1))
    verify_snapshot(snapshot, EXPECTED, lambda entry: fetched.append(entry) or buckets[entry], "engine-1")
    assert fetched == [0, 1]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([make_bucket([("a", A), ("b", B)])], "engine-1: weights version 3: 1 missing parameters: c"),
        ([make_bucket([("a", A), ("b", B), ("c", C), ("a", A)])], "bucket 0: a: given twice"),
        ([make_bucket([("a", A)]), make_bucket([("b", B), ("x", C)])], "bucket 1: x: unknown parameter"),
        ([make_bucket([("a", A.T), ("b", B), ("c", C)])], r"bucket 0: a: expected shape \[2, 3\], got \[3, 2\]"),
        (
            [replace(make_bucket([("a", A)]), checksum="0")],
            "engine-1: weights version 3: bucket 0: checksum: expected 0",
        ),
    ],
)
def test_refuses(buckets, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(snapshot_of(*buckets))


def test_decodes_mixed_dtypes() -> None:
    half = torch.arange(3, dtype=torch.bfloat16)
    data = np.concatenate([half.view(torch.uint8).numpy(), B.view(np.uint8)])
    data.flags.writeable = False  # as Ray hands it out
    bucket = replace(make_bucket([]), names=("h", "b"), shapes=((3,), (4,)), dtypes=("bfloat16", "float32"), data=data)
    weights = dict(iterate_weights(snapshot_of(bucket), lambda entry: entry, torch.float32))
    assert torch.equal(weights["h"], half.float())
    assert torch.equal(weights["b"], torch.from_numpy(B))


@pytest.mark.parametrize("tied", [False, True])
def test_expected_shapes_are_those_that_a_learner_publishes(tiny_model, tied: bool) -> None:
    path = tiny_model(num_layers=1, tied=tied)
    model = build_tiny_model(num_layers=1, tied=tied)
    assert expected_shapes(path) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert ("lm_head.weight" in expected_shapes(path)) != tied
    verify_snapshot(make_snapshot(model, version=1), expected_shapes(path), lambda bucket: bucket, "engine-1")
