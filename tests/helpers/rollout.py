"""Small engines and weight snapshots for the tests of the sampler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from kv_policies.config import PolicyConfig
from orchestration.contracts import PromptGroup, WeightBucket, WeightSnapshot
from rollout_workers.config import RolloutConfig, SamplingConfig
from tests.helpers.tiny_models import random_prompt

TOLERANCE = 1e-4
"""Bound on max |delta log p| in float32, in nats."""


@contextmanager
def rollout_engine(
    path: Path, policy: PolicyConfig, *, max_response_tokens: int = 12, temperature: float = 1.0, **rollout: Any
) -> Iterator[Any]:
    """A `RolloutEngine` with a pool of 16 MiB, shut down at the end."""
    from rollout_workers.engine import RolloutEngine

    options = {"max_model_len": 512, "kv_cache_bytes": 16 << 20, "max_num_batched_tokens": 512} | rollout
    engine = RolloutEngine(
        path,
        policy=policy,
        rollout=RolloutConfig(**options),
        sampling=SamplingConfig(max_response_tokens=max_response_tokens, temperature=temperature),
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def prompt_groups(lengths: Sequence[int], *, num_samples: int = 2, seed: int = 0) -> list[PromptGroup]:
    """One group per length, with different prompts, named by their length."""
    return [
        PromptGroup(
            group_id=f"P{length}-{i}",
            prompt_token_ids=random_prompt(length, seed=seed + i),
            num_samples=num_samples,
            answer=str(length),
            metadata={"row": i},
        )
        for i, length in enumerate(lengths)
    ]


def make_snapshot(model: PreTrainedModel, *, version: int, bucket_bytes: int = 200_000) -> WeightSnapshot:
    """The parameters of a HF model in buckets of about `bucket_bytes`."""
    buckets: list[WeightBucket] = []
    pending: list[tuple[str, np.ndarray]] = []
    for name, parameter in model.named_parameters():
        pending.append((name, parameter.detach().numpy()))
        if sum(array.nbytes for _, array in pending) >= bucket_bytes:
            buckets.append(make_bucket(pending))
            pending = []
    if pending:
        buckets.append(make_bucket(pending))
    return WeightSnapshot(version=version, checksum=combined_checksum(buckets), buckets=tuple(buckets))


def combined_checksum(buckets: Sequence[Any]) -> str:
    """Checksum of a snapshot with these buckets."""
    checksums = "".join(getattr(bucket, "checksum", "") for bucket in buckets)
    return hashlib.blake2b(checksums.encode(), digest_size=16).hexdigest()


def make_bucket(parameters: Sequence[tuple[str, np.ndarray]]) -> WeightBucket:
    """A bucket of (name, array) pairs with its right checksum."""
    data = np.frombuffer(b"".join(array.tobytes() for _, array in parameters), np.uint8)
    return WeightBucket(
        names=tuple(name for name, _ in parameters),
        shapes=tuple(array.shape for _, array in parameters),
        dtypes=tuple(str(array.dtype) for _, array in parameters),
        data=data,
        checksum=hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest(),
    )
