"""Trajectories on disk: one parquet file, one row per sample, shadow masks included.

| column | type | |
|---|---|---|
| group_id, sample_index | string, int32 | |
| prompt_token_ids, response_token_ids | list<int32> | [P], [R] |
| logprobs | list<float32> | [R], nats, as sampled |
| temperature | float64 | |
| finish_reason, policy, text | string | |
| weight_versions | list<int32> | ascending |
| mask | binary | `ShadowMask.to_bytes()` |
| kv | struct of int64 | the fields of `KVStats` |
| answer, metadata | string | JSON |
| reward | float64, nullable | null until scored |

The schema's version is in the file's metadata; another version is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kv_policies.shadow_mask import ShadowMask
from orchestration.contracts import KVStats, Trajectory

SCHEMA_VERSION = 1

_VERSION_KEY = b"penumbra.trajectories.version"
_ROW_GROUP_ROWS = 256

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("weight_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("policy", pa.string(), nullable=False),
        pa.field("mask", pa.binary(), nullable=False),
        pa.field("kv", pa.struct([(field.name, pa.int64()) for field in fields(KVStats)]), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


class TrajectoryWriter:
    """Writes trajectories as they arrive; the file appears under its name only when it is whole.

    Example:
        >>> with TrajectoryWriter("rollouts.parquet") as writer:  # doctest: +SKIP
        ...     for trajectory in engine.generate(groups):
        ...         writer.write(trajectory)
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f".{self._path.name}.partial")
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> TrajectoryWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        return self

    def write(self, trajectory: Trajectory) -> None:
        """Appends one trajectory.

        Raises:
            ValueError: its answer or metadata is not JSON-serialisable.
        """
        self._rows.append(_to_row(trajectory))
        if len(self._rows) == _ROW_GROUP_ROWS:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
            self._writer.close()
            if error is None:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows.clear()


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes `trajectories` to one parquet file, replacing it only once the new one is whole."""
    with TrajectoryWriter(path) as writer:
        for trajectory in trajectories:
            writer.write(trajectory)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Reads what `save_trajectories` wrote.

    Raises:
        ValueError: not such a file, another schema version, or a row that contradicts itself (for example a mask
            that does not cover its tokens); names the file and the row.
    """
    return list(iter_trajectories(path))


def iter_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Reads a file row group by row group; raises like `load_trajectories`."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: expected a parquet file of trajectories, got {_describe(Path(path))}")
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a parquet file of trajectories, got something else ({error})") from error
    with file:
        _check_schema(path, file.schema_arrow)
        rows = (row for batch in file.iter_batches(batch_size=_ROW_GROUP_ROWS) for row in batch.to_pylist())
        for index, row in enumerate(rows):
            try:
                yield _from_row(row)
            except ValueError as error:
                raise ValueError(f"{path}: row {index}: {error}") from error


def _check_schema(path: str | Path, schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise ValueError(f"{path}: expected trajectories (metadata key {_VERSION_KEY.decode()}), got other columns")
    if version != str(SCHEMA_VERSION).encode():
        raise ValueError(f"{path}: schema version: expected {SCHEMA_VERSION}, got {version.decode(errors='replace')}")
    wrong = [f.name for f in SCHEMA if f.name not in schema.names or schema.field(f.name).type != f.type]
    if wrong:
        raise ValueError(
            f"{path}: expected the columns of schema version {SCHEMA_VERSION}, missing or mistyped: {wrong}"
        )


def _describe(path: Path) -> str:
    return "a folder" if path.is_dir() else "no such file"


def _to_row(trajectory: Trajectory) -> dict[str, Any]:
    row = {name: getattr(trajectory, name) for name in SCHEMA.names}
    row["mask"] = trajectory.mask.to_bytes()
    row["kv"] = asdict(trajectory.kv)
    for name in ("answer", "metadata"):
        try:
            row[name] = json.dumps(row[name])
        except TypeError as error:
            raise ValueError(
                f"Trajectory {trajectory.group_id}/{trajectory.sample_index}: {name}: expected JSON, {error}"
            ) from error
    return row


def _from_row(row: dict[str, Any]) -> Trajectory:
    return Trajectory(
        **row
        | {
            "prompt_token_ids": tuple(row["prompt_token_ids"]),
            "response_token_ids": tuple(row["response_token_ids"]),
            "logprobs": np.asarray(row["logprobs"], dtype=np.float32),
            "weight_versions": tuple(row["weight_versions"]),
            "mask": ShadowMask.from_bytes(row["mask"]),
            "kv": KVStats(**row["kv"]),
            "answer": json.loads(row["answer"]),
            "metadata": json.loads(row["metadata"]),
        }
    )
