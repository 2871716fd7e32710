"""The history of a run is appended to its files, cut back to a checkpoint, and read as one table."""

import os
from pathlib import Path

import numpy as np
import pytest

from raysim.lifecycle import history as module
from raysim.lifecycle.appended_file import FileDamaged, Mark
from raysim.lifecycle.history import History, RowFile


def rows(*numbers: int, **further: float) -> dict[str, np.ndarray]:
    columns = {"round": np.array(numbers), "loss": np.array(numbers) / 2}
    return columns | {name: np.full(len(numbers), value) for name, value in further.items()}


def test_rows_come_back_in_order_whether_written_or_waiting_and_what_a_round_lacks_is_nan(tmp_path: Path):
    file = RowFile(tmp_path / "folder" / "rows.npy")
    file.append(rows(1))
    file.append(rows(2, accuracy=0.5))
    file.flush()
    file.append(rows(3, 4))
    frame = file.frame()
    assert frame["round"].tolist() == [1, 2, 3, 4] and frame["round"].dtype == np.int64
    assert frame["loss"].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert frame["accuracy"].isna().tolist() == [True, False, True, True]
    assert list(frame) == ["round", "loss", "accuracy"]
    assert RowFile(tmp_path / "none.npy").frame().empty


def test_a_flush_writes_the_new_rows_alone(tmp_path: Path):
    """Ten rows take as many bytes at the start as after ten thousand."""
    file = RowFile(tmp_path / "rows.npy")
    sizes = [0]
    for start in (0, 10, 10_000):
        file.append(rows(*range(start, start + (10 if start != 10 else 9_000))))
        sizes.append(file.flush().size)
    assert sizes[1] - sizes[0] == sizes[3] - sizes[2]
    assert file.flush().size == sizes[3]


def test_it_is_cut_back_to_a_mark_and_goes_on_from_there_as_if_nothing_had_been(tmp_path: Path):
    file = RowFile(tmp_path / "rows.npy")
    file.append(rows(1, 2))
    mark = file.flush()
    file.append(rows(3))
    file.flush()
    resumed = RowFile(tmp_path / "rows.npy")
    resumed.cut(mark)
    resumed.append(rows(3))
    assert resumed.frame()["round"].tolist() == [1, 2, 3]
    assert resumed.flush() == file.flush()
    resumed.cut(Mark())
    assert resumed.frame().empty and (tmp_path / "rows.npy").stat().st_size == 0


@pytest.mark.parametrize("damage", ["shorter", "flipped", "missing"])
def test_a_file_that_is_not_what_the_checkpoint_saw_is_noticed(tmp_path: Path, damage: str):
    path = tmp_path / "rows.npy"
    file = RowFile(path)
    file.append(rows(1, 2))
    mark = file.flush()
    if damage == "shorter":
        os.truncate(path, mark.size - 1)
    elif damage == "flipped":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(FileDamaged, match=str(path)):
        RowFile(path).cut(mark)


def test_what_a_full_disk_refuses_waits_and_is_written_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = RowFile(tmp_path / "rows.npy")
    file.append(rows(1))
    before = file.flush()
    file.append(rows(2))

    def half(target: object, block: object, **_: object) -> None:
        target.write(b"half of it")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(module.np, "save", half)
        file.flush()
    assert (tmp_path / "rows.npy").stat().st_size == before.size
    file.append(rows(3))
    file.flush()
    assert file.frame()["round"].tolist() == [1, 2, 3]


def test_many_rows_do_not_wait_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_PENDING", 100)
    history = History(tmp_path)
    for number in range(1, 4):
        history.append({"round": number}, {"round": np.full(60, number), "client": np.arange(60)})
    assert (tmp_path / "clients.npy").exists() and not (tmp_path / "metrics.npy").exists()
    assert len(history.clients.frame()) == 180
    marks = history.flush()
    history.append({"round": 4}, {"round": np.full(1, 4), "client": np.arange(1)})
    history.cut(marks)
    assert history.metrics.frame()["round"].tolist() == [1, 2, 3] and len(history.clients.frame()) == 180
