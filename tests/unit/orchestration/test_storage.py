"""Trajectories survive the disk exactly, and what is not such a file is refused with its name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kv_policies.shadow_mask import ShadowMask
from orchestration.contracts import KVStats, Trajectory
from orchestration.storage import SCHEMA, TrajectoryWriter, load_trajectories, save_trajectories
from tests.helpers.samples import make_trajectory


def assert_equal(got: Trajectory, expected: Trajectory) -> None:
    for field in fields(Trajectory):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "logprobs":
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other, field.name


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    dense = make_trajectory(
        "dense",
        policy="dense",
        mask=ShadowMask.dense(num_tokens=6, num_layers=1, num_kv_heads=2),
        kv=KVStats(context_tokens=3, context_kept=3, peak_blocks=1, final_blocks=1),
        reward=None,
        answer=None,
        finish_reason="length",
        weight_versions=(1, 2),
    )
    trajectories = [make_trajectory(sample_index=i) for i in range(3)] + [dense]
    path = tmp_path / "new" / "samples.parquet"
    save_trajectories(path, trajectories)
    loaded = load_trajectories(path)
    assert len(loaded) == len(trajectories)
    for got, expected in zip(loaded, trajectories, strict=True):
        assert_equal(got, expected)


def test_more_rows_than_a_row_group(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    save_trajectories(path, (make_trajectory(sample_index=i) for i in range(600)))
    assert pq.ParquetFile(path).num_row_groups == 3
    assert [t.sample_index for t in load_trajectories(path)] == list(range(600))


def test_file_without_rows(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "none.parquet", [])
    assert load_trajectories(tmp_path / "none.parquet") == []


def test_interrupted_writing_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    save_trajectories(path, [make_trajectory("old")])
    with pytest.raises(RuntimeError, match="engine died"), TrajectoryWriter(path) as writer:
        writer.write(make_trajectory("new"))
        raise RuntimeError("engine died")
    assert [t.group_id for t in load_trajectories(path)] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_answer_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="g/0: answer: expected JSON"):
        save_trajectories(tmp_path / "samples.parquet", [make_trajectory(answer=object())])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.parquet: expected a parquet file of trajectories, got no such file"):
        load_trajectories(tmp_path / "absent.parquet")


def test_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "text.parquet"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"text\.parquet: expected a parquet file"):
        load_trajectories(path)


def test_other_parquet(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="expected trajectories"):
        load_trajectories(path)


def test_other_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    save_trajectories(path, [make_trajectory()])
    table = pq.read_table(path).replace_schema_metadata({"penumbra.trajectories.version": "2"})
    pq.write_table(table, path)
    with pytest.raises(ValueError, match="schema version: expected 1, got 2"):
        load_trajectories(path)


def test_column_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    save_trajectories(path, [make_trajectory()])
    table = pq.read_table(path)
    column = table.schema.get_field_index("temperature")
    table = table.set_column(column, "temperature", table["temperature"].cast(pa.string()))
    pq.write_table(table.replace_schema_metadata(SCHEMA.metadata), path)
    with pytest.raises(ValueError, match=r"missing or mistyped: \['temperature'\]"):
        load_trajectories(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("mask", ShadowMask.dense(num_tokens=7, num_layers=1, num_kv_heads=2).to_bytes(), "mask: expected to cover 6"),
        ("mask", ShadowMask.dense(num_tokens=6, num_layers=1, num_kv_heads=2).to_bytes(), "got a dense mask"),
        ("mask", make_trajectory().mask.to_bytes()[:-1], "shadow mask: event 0"),
        ("logprobs", [-0.5], "logprobs: expected float32"),
    ],
)
def test_row_that_contradicts_itself_is_named(tmp_path: Path, column: str, value: object, message: str) -> None:
    path = tmp_path / "samples.parquet"
    save_trajectories(path, [make_trajectory(), make_trajectory(sample_index=1)])
    rows = pq.read_table(path).to_pylist()
    rows[1][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        load_trajectories(path)
