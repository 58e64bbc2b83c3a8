"""A run folder is new, and a folder with its final name is whole."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from orchestration.run_folder import RunFolder, save_model, write_atomically

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / "runs", "needle", now=NOW) for _ in range(3)]
    names = ["needle-20260102-030405", "needle-20260102-030405-1", "needle-20260102-030405-2"]
    assert [folder.path.name for folder in folders] == names
    assert all(folder.logs_dir.is_dir() and folder.checkpoints_dir.is_dir() for folder in folders)


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match=r"^run\.output_dir: expected a folder that can be written to, got .*/runs"):
        RunFolder.create(tmp_path / "runs", "needle", now=NOW)


def test_model_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "step-1"

    def save(path: str) -> None:
        Path(path).mkdir()
        assert not target.exists()
        (Path(path) / "config.json").write_text("{}")

    save_model(save, target)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert (target / "config.json").is_file()


def test_failed_save_leaves_no_model(tmp_path: Path) -> None:
    def save(path: str) -> None:
        Path(path).mkdir()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_model(save, tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    with pytest.raises(FileExistsError, match="never overwritten"):
        save_model(lambda path: Path(path).mkdir(), tmp_path / "final")


def test_model_saved_on_another_file_system_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="file system that driver and learner share"):
        save_model(lambda path: None, tmp_path / "final")


def test_text_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "1")
    write_atomically(path, "2")
    assert path.read_text() == "2"
    assert list(tmp_path.iterdir()) == [path]
