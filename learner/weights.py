"""Weights on the wire: buckets of whole parameters with checksums.

Parameters travel under their HF names, a tied one once, under the name that `named_parameters` gives it first: tied
embeddings arrive as `model.embed_tokens.weight` alone, without `lm_head.weight`. Buffers do not travel: models that
the learner accepts compute theirs from the configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from orchestration.contracts import WeightBucket


def make_buckets(parameters: Iterable[tuple[str, torch.Tensor]], *, max_bytes: int) -> Iterator[WeightBucket]:
    """Copies parameters into buckets, one at a time, in order.

    Args:
        parameters: (HF name, tensor), consumed as the buckets are.
        max_bytes: largest bucket; a larger parameter travels alone.
    """
    bucket: list[_Packed] = []
    size = 0
    for name, tensor in parameters:
        if bucket and size + tensor.nbytes > max_bytes:
            yield _join(bucket)
            bucket, size = [], 0
        bucket.append(_pack(name, tensor))
        size += tensor.nbytes
    if bucket:
        yield _join(bucket)


def combine_checksums(checksums: Iterable[str]) -> str:
    """The checksum of a snapshot: hex blake2b-128 over its buckets' hex checksums, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for checksum in checksums:
        digest.update(checksum.encode())
    return digest.hexdigest()


class _Packed(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray
    """uint8."""


def _pack(name: str, tensor: torch.Tensor) -> _Packed:
    # A copy, at once: under ZeRO-3 the whole parameter exists only while the caller's iterator stands on it. As bytes,
    # because numpy has no bfloat16.
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().copy()
    return _Packed(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data)


def _join(parameters: list[_Packed]) -> WeightBucket:
    data = np.concatenate([p.data for p in parameters]) if len(parameters) > 1 else parameters[0].data
    return WeightBucket(
        names=tuple(p.name for p in parameters),
        shapes=tuple(p.shape for p in parameters),
        dtypes=tuple(p.dtype for p in parameters),
        data=data,
        checksum=hashlib.blake2b(data.data, digest_size=16).hexdigest(),
    )
