"""States of clients on disk: only what changed is written, what is written comes back, and damage is noticed."""

from pathlib import Path

import numpy as np
import pytest

from raysim.federation.state import ClientStates
from raysim.lifecycle import client_file
from raysim.lifecycle.appended_file import FileDamaged
from raysim.lifecycle.client_file import ClientFile


class Ref:
    """Stands for a reference to a value in the object store."""

    def __init__(self, value):
        self.value = value


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_file, "put", Ref)
    monkeypatch.setattr(client_file, "get", lambda ref: ref.value)


def state(value: float) -> Ref:
    return Ref({"c": np.full((2, 3), value, np.float32).T, "n": np.array(7)})


def values(states: ClientStates) -> dict[int, float]:
    for _, ref in states.items():
        assert (ref.value["c"].shape, ref.value["c"].dtype, int(ref.value["n"])) == ((3, 2), np.float32, 7)
    return {k: float(ref.value["c"][0, 0]) for k, ref in states.items()}


def test_a_checkpoint_appends_only_what_has_changed(tmp_path: Path):
    file = ClientFile(tmp_path)
    states = ClientStates({k: state(k) for k in range(100)})
    first = file.write(1, states)
    states = states.after({3: state(30.0), 200: state(200.0)})
    second = file.write(2, states)
    assert second["file"] == first["file"]
    assert second["size"] - first["size"] == pytest.approx(first["size"] / 50, rel=0.01)
    assert file.write(3, states) == second, "nothing has changed"
    assert values(ClientFile(tmp_path).read(second)) == {k: float(k) for k in [*range(100), 200]} | {3: 30.0}
    assert values(ClientFile(tmp_path).read(first)) == {k: float(k) for k in range(100)}


def test_a_file_that_is_mostly_out_of_date_is_replaced_and_goes_when_no_checkpoint_refers_to_it(tmp_path: Path):
    file = ClientFile(tmp_path)
    states = ClientStates()
    marks = []
    for round_ in range(1, 9):
        states = states.after({k: state(100 * round_ + k) for k in range(4)})
        marks.append(file.write(round_, states))
        file.prune(marks[-2:])
    assert len({mark["file"] for mark in marks}) == 4, "a new one every second time"
    assert {path.name for path in tmp_path.iterdir()} == {mark["file"] for mark in marks[-2:]}
    assert values(ClientFile(tmp_path).read(marks[-1])) == {k: 800.0 + k for k in range(4)}


def test_a_resumed_run_goes_on_from_the_mark_and_drops_what_was_written_after_it(tmp_path: Path):
    file = ClientFile(tmp_path)
    states = ClientStates({k: state(k) for k in range(10)})
    mark = file.write(1, states)
    file.write(2, states.after({1: state(-1.0)}))
    resumed = ClientFile(tmp_path)
    restored = resumed.read(mark)
    assert resumed.write(2, restored) == mark, "what was read is what is on disk"
    again = resumed.write(2, restored.after({2: state(-2.0)}))
    assert (tmp_path / mark["file"]).stat().st_size == again["size"]
    assert values(ClientFile(tmp_path).read(again)) == {k: float(k) for k in range(10)} | {2: -2.0}


def test_clients_that_keep_nothing_leave_no_file(tmp_path: Path):
    file = ClientFile(tmp_path)
    assert file.write(1, ClientStates()) == {}
    assert not list(tmp_path.iterdir())
    assert len(file.read({})) == 0


@pytest.mark.parametrize("position", [0, 9, 40, -1])
def test_a_changed_bit_is_noticed(tmp_path: Path, position: int):
    mark = ClientFile(tmp_path).write(1, ClientStates({0: state(1.0)}))
    path = tmp_path / mark["file"]
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileDamaged, match="checksum"):
        ClientFile(tmp_path).read(mark)


def test_a_file_that_is_cut_short_or_gone_is_named(tmp_path: Path):
    mark = ClientFile(tmp_path).write(1, ClientStates({0: state(1.0)}))
    path = tmp_path / mark["file"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileDamaged, match=str(path)):
        ClientFile(tmp_path).read(mark)
    path.unlink()
    with pytest.raises(FileDamaged, match=str(path)):
        ClientFile(tmp_path).read(mark)


def test_a_write_that_fails_keeps_the_earlier_states_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = ClientFile(tmp_path)
    states = ClientStates({k: state(k) for k in range(10)})
    mark = file.write(1, states)
    states = states.after({1: state(-1.0)})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(client_file.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            file.write(2, states)
    assert values(ClientFile(tmp_path).read(mark)) == {k: float(k) for k in range(10)}
    assert values(ClientFile(tmp_path).read(file.write(3, states)))[1] == -1.0
