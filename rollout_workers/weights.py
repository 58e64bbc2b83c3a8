"""Weight snapshots on the engine's side: everything is verified before anything is loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from orchestration.contracts import WeightBucket, WeightSnapshot

FetchBucket = Callable[[Any], WeightBucket]
"""Turns an entry of `WeightSnapshot.buckets` into the bucket itself."""


def expected_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a HF model folder, tied ones once; no weight is read."""
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def verify_snapshot(
    snapshot: WeightSnapshot, expected: Mapping[str, Sequence[int]], fetch: FetchBucket, where: str
) -> None:
    """Checks checksums, names, shapes and sizes of all buckets, one bucket at a time.

    Args:
        snapshot: the weights to be loaded.
        expected: name -> shape of the model's parameters.
        fetch: gets one bucket; called once per bucket.
        where: name of the engine, for the messages.

    Raises:
        ValueError: names the engine, and the bucket or the parameters.
    """
    seen: set[str] = set()
    combined = hashlib.blake2b(digest_size=16)
    for index in range(len(snapshot.buckets)):
        bucket = fetch(snapshot.buckets[index])
        at = f"{where}: weights version {snapshot.version}: bucket {index}"
        found = hashlib.blake2b(bucket.data.data, digest_size=16).hexdigest()
        if found != bucket.checksum:
            raise ValueError(f"{at}: checksum: expected {bucket.checksum}, got {found}: refused, nothing was loaded")
        combined.update(found.encode())
        size = sum(_num_bytes(shape, dtype) for shape, dtype in zip(bucket.shapes, bucket.dtypes, strict=True))
        if size != bucket.data.nbytes:
            raise ValueError(f"{at}: data: expected {size} bytes for its shapes, got {bucket.data.nbytes}")
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            if name not in expected or name in seen:
                raise ValueError(f"{at}: {name}: {'given twice' if name in seen else 'unknown parameter'}")
            if tuple(shape) != tuple(expected[name]):
                raise ValueError(f"{at}: {name}: expected shape {list(expected[name])}, got {list(shape)}")
            seen.add(name)
    if combined.hexdigest() != snapshot.checksum:
        raise ValueError(
            f"{where}: weights version {snapshot.version}: checksum over all buckets: expected {snapshot.checksum}, "
            f"got {combined.hexdigest()}: buckets of different snapshots"
        )
    if missing := [name for name in expected if name not in seen]:
        raise ValueError(
            f"{where}: weights version {snapshot.version}: {len(missing)} missing parameters: {', '.join(missing[:5])}"
        )


def iterate_weights(
    snapshot: WeightSnapshot, fetch: FetchBucket, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (HF name, tensor of `dtype`) in order, holding one bucket at a time."""
    for entry in snapshot.buckets:
        bucket = fetch(entry)
        offset = 0
        for name, shape, sent_as in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            size = _num_bytes(shape, sent_as)
            data = bucket.data[offset : offset + size].copy()  # of its own: aligned, and writable where Ray's is not
            yield name, torch.from_numpy(data).view(getattr(torch, sent_as)).view(shape).to(dtype)
            offset += size


def retie_embeddings(worker: Any) -> None:
    """Runs on the worker after a reload: makes a tied output layer share the input embedding's new weight again.

    vLLM's layer-wise reload rebuilds the two layers one by one, which leaves the output layer with the old weights;
    on CPU the output layer also holds a prepacked copy that has to be made anew.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    model = worker.get_model()
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    model.lm_head.weight = model.model.embed_tokens.weight
    if current_platform.is_cpu():
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize
