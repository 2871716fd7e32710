"""A checkpoint is whole or it is not used; nothing that fails while writing harms the one before."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raysim.lifecycle.checkpoint import CheckpointError, load_latest, save, write_atomic

ARRAYS = {
    "parameters": np.arange(6, dtype=np.float32).reshape(2, 3),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "every_other": np.arange(10)[::2],
    "counter": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.uint8),
    "mask": np.array([True, False]),
}


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def arrays_file(directory: Path, round_: int) -> Path:
    (path,) = directory.glob(f"round-{round_:06d}-*.safetensors")
    return path


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    meta = {"history": [{"accuracy": 0.1 + 0.2}], "run": "abc", "numbers": np.arange(2), "one": np.float64(1e-300)}
    path = save(tmp_path, 3, ARRAYS, meta, keep=2)
    found = load_latest(tmp_path)
    assert found is not None
    assert (found.round, found.path, found.notes) == (3, path, [])
    assert found.meta == {"history": [{"accuracy": 0.1 + 0.2}], "run": "abc", "numbers": [0, 1], "one": 1e-300}
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_numbers_that_are_not_finite_and_keys_that_are_numbers_keep_the_checksum_valid(tmp_path):
    """JSON sorts the texts "10" < "2" but Python sorts the numbers 2 < 10."""
    save(tmp_path, 1, {}, {"seconds": {2: 1.0, 10: float("nan")}}, keep=1)
    found = load_latest(tmp_path)
    assert found is not None and set(found.meta["seconds"]) == {"2", "10"}


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "missing") is None


def test_only_the_newest_are_kept(tmp_path):
    for round_ in (1, 2, 3, 10):
        save(tmp_path, round_, ARRAYS, {}, keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["round-000003.json", "round-000010.json"]
    assert len(list(tmp_path.iterdir())) == 4


def test_saving_an_earlier_round_drops_the_future_that_was_given_up(tmp_path):
    for round_ in (2, 4, 3):
        save(tmp_path, round_, {"w": np.array([round_])}, {}, keep=5)
    found = load_latest(tmp_path)
    assert found is not None and found.round == 3
    assert not list(tmp_path.glob("round-000004*"))


def test_saving_a_round_again_replaces_it(tmp_path):
    for value in (1, 2):
        save(tmp_path, 1, {"w": np.array([value])}, {}, keep=2)
    found = load_latest(tmp_path)
    assert found is not None and found.arrays["w"].tolist() == [2]
    assert len(list(tmp_path.iterdir())) == 2


def spoil_arrays(directory):
    flip(arrays_file(directory, 2), -1)


def truncate_arrays(directory):
    path = arrays_file(directory, 2)
    path.write_bytes(path.read_bytes()[:-5])


def delete_arrays(directory):
    arrays_file(directory, 2).unlink()


def truncate_json(directory):
    path = directory / "round-000002.json"
    path.write_bytes(path.read_bytes()[:40])


def empty_json(directory):
    (directory / "round-000002.json").write_bytes(b"")


def change_meta(directory):
    path = directory / "round-000002.json"
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.75"))


def other_json(directory):
    (directory / "round-000002.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    "damage", [spoil_arrays, truncate_arrays, delete_arrays, truncate_json, empty_json, change_meta, other_json]
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path, damage):
    for round_ in (1, 2):
        save(tmp_path, round_, ARRAYS, {"accuracy": 0.25}, keep=2)
    damage(tmp_path)
    found = load_latest(tmp_path)
    assert found is not None and found.round == 1
    assert "round 2 is damaged" in found.notes[0] and "round-000002.json" in found.notes[0]
    assert found.notes[1] == "using the checkpoint of round 1 instead"


def test_every_single_bit_flip_in_the_json_is_noticed_or_harmless(tmp_path):
    """A flip may turn a space into another blank; then the content is the same, else the checkpoint is refused."""
    save(tmp_path, 1, {"w": np.arange(2)}, {"run": "x"}, keep=1)
    path = tmp_path / "round-000001.json"
    good = path.read_bytes()
    for position in range(len(good)):
        flip(path, position)
        try:
            found = load_latest(tmp_path)
            assert found is not None and (found.round, found.meta) == (1, {"run": "x"})
        except CheckpointError:
            pass
        path.write_bytes(good)


def test_when_all_are_damaged_the_error_says_so_instead_of_starting_over(tmp_path):
    save(tmp_path, 1, ARRAYS, {}, keep=2)
    flip(arrays_file(tmp_path, 1), 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read:\ncheckpoint of round 1 is damaged"):
        load_latest(tmp_path)


@pytest.fixture
def small_files():
    """The operating system refuses files above 20 kB, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_keeps_the_previous_checkpoint_and_says_what_to_do(tmp_path, small_files):
    save(tmp_path, 1, ARRAYS, {}, keep=1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"round 2: cannot write .*: File too large; free space") as raised:
        save(tmp_path, 2, {"w": np.zeros(100_000)}, {}, keep=1)
    assert str(tmp_path) in str(raised.value)
    with pytest.raises(CheckpointError):
        save(tmp_path, 2, {}, {"history": list(range(100_000))}, keep=1)
    assert [path for path in before if not path.exists()] == []
    found = load_latest(tmp_path)
    assert found is not None and (found.round, found.notes) == (1, [])


def test_a_full_disk_is_reported_as_such(tmp_path, monkeypatch):
    save(tmp_path, 1, ARRAYS, {}, keep=1)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 2, ARRAYS, {}, keep=1)
    assert not list(tmp_path.glob(".*"))
    found = load_latest(tmp_path)
    assert found is not None and found.round == 1


KILLED_WRITER = """
import itertools, sys
import numpy as np
from pathlib import Path
from raysim.lifecycle.checkpoint import save
save(Path(sys.argv[1]), 0, {"w": np.full(50_000, 0)}, {"round": 0}, keep=2)
print("ready", flush=True)
for r in itertools.count(1):
    save(Path(sys.argv[1]), r, {"w": np.full(50_000, r)}, {"round": r}, keep=2)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint_and_its_rests_are_cleaned(tmp_path):
    for attempt in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        try:
            writer.wait(0.05 + 0.037 * attempt)
        except subprocess.TimeoutExpired:
            writer.kill()
        writer.wait()
        writer.stdout.close()
        found = load_latest(tmp_path)
        assert found is not None and found.notes == []
        assert (found.arrays["w"] == found.round).all() and found.meta == {"round": found.round}
    (tmp_path / ".round-000009.json.1-aa.tmp").write_text("half")
    (tmp_path / "round-000009-0123456789abcdef.safetensors").write_text("half")
    save(tmp_path, 10_000, ARRAYS, {}, keep=1)
    assert len(list(tmp_path.iterdir())) == 2


def test_write_atomic_replaces_or_leaves(tmp_path, small_files):
    path = tmp_path / "new" / "file.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    with pytest.raises(OSError, match="File too large"):
        write_atomic(path, bytes(100_000))
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_every_file_loads_without_pickle(tmp_path):
    from safetensors.numpy import load_file

    save(tmp_path, 1, ARRAYS, {"scalar": np.float32(0.5)}, keep=1)
    assert json.loads((tmp_path / "round-000001.json").read_text())["meta"] == {"scalar": 0.5}
    assert load_file(arrays_file(tmp_path, 1)).keys() == ARRAYS.keys()
