"""Partitions in files: saved ones come back the same, bad ones are refused."""

import json

import numpy as np
import pytest

from raysim.config.registry import available, resolve
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.data.modifiers import input_noise, label_noise, rare
from raysim.data.partition_file import save_partition, unchecked_note
from raysim.data.partitions import file, iid

CIFAR10_LABELS = np.repeat(np.arange(10), 5000)
MIXED_LABELS = np.random.Generator(np.random.Philox(5)).permutation(np.repeat(np.arange(5), [40, 60, 80, 100, 120]))


def make(name: str, labels_N: np.ndarray, classes: int, seed: int = 0, **keys):
    return resolve("partition", name)(labels_N, classes, rng.stream(seed, rng.PARTITION), **keys)


@pytest.mark.parametrize("suffix", [".json", ".npz"])
@pytest.mark.parametrize("name", sorted(set(available("partition")) - {"file"}))
def test_a_saved_partition_comes_back_with_the_same_hash(tmp_path, name, suffix):
    owned = make(name, CIFAR10_LABELS[::25], 10, clients=10, **({"alpha": 1.0} if name.startswith("dirichlet") else {}))
    cut = rare(owned, rng.stream(0, "a"), max_samples=5)
    for modified in (owned, input_noise(label_noise(cut, rng.stream(0, "b")), rng.stream(0, "c"))):
        path = tmp_path / f"sub/partition{suffix}"
        save_partition(modified, path, CIFAR10_LABELS[::25])
        again = file(CIFAR10_LABELS[::25], 10, rng.stream(9, "t"), path=str(path), clients=10)
        assert again.sha256() == modified.sha256()


def test_explicit_lists_are_taken_as_they_are(tmp_path):
    path = tmp_path / "lists.json"
    for content in ([[4, 2], [0]], {"clients": [[4, 2], [0]]}):
        path.write_text(json.dumps(content))
        owned = file(np.arange(5), 5, rng.stream(0, "t"), path=str(path))
        assert owned.client(0)[0].tolist() == [4, 2] and owned.client(1)[1].tolist() == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0, 1], [1]]", "row 1 comes twice"),
        ("[[0, 5]]", "row 5 does not exist; the training split has the rows 0 to 4"),
        ("[[0, -1]]", "row -1 does not exist"),
        ("[[0], []]", "client 1 should be a non-empty list"),
        ("[[0], [1, 1267650600228229401496703205376]]", "client 1 names row 1267650600228229401496703205376"),
        ("[[0], [-1267650600228229401496703205376]]", "client 1 names row -1267650600228229401496703205376"),
        ("[[0], [1.5]]", "client 1 should be"),
        ("[[0], [true]]", "client 1 should be"),
        ("[]", "there is no client"),
        ("7", "one list of training rows per client"),
        ("", "cannot be read"),
        ('{"indices": [0]}', "offsets_K1.*missing"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_the_reason(tmp_path, text, message):
    path = tmp_path / "lists.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        file(np.arange(5), 5, rng.stream(0, "t"), path=str(path))
    assert "partition.path" in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_absent_truncated_or_of_another_data_set_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"partition\.path = .*does not exist"):
        file(np.arange(5), 5, rng.stream(0, "t"), path=str(tmp_path / "nowhere.json"))
    path = tmp_path / "partition.npz"
    save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), path, MIXED_LABELS)
    with pytest.raises(UserError, match=r"partition\.clients = 9: .* lists 4 clients"):
        file(MIXED_LABELS, 5, rng.stream(0, "t"), path=str(path), clients=9)
    with pytest.raises(UserError, match="made for 5 classes, but the data set has 6"):
        file(MIXED_LABELS, 6, rng.stream(0, "t"), path=str(path))
    with pytest.raises(UserError, match="does not exist; the training split has the rows 0 to 99"):
        file(MIXED_LABELS[:100], 5, rng.stream(0, "t"), path=str(path))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be read"):
        file(MIXED_LABELS, 5, rng.stream(0, "t"), path=str(path))
    with pytest.raises(UserError, match=r"\.json or \.npz"):
        save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), tmp_path / "partition.csv", MIXED_LABELS)


def test_damaged_offsets_are_refused(tmp_path):
    path = tmp_path / "partition.json"
    save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), path, MIXED_LABELS)
    content = json.loads(path.read_text())
    content["offsets_K1"][2] = 390
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="offsets_K1 do not ascend from 0 to the number of indices, "):
        file(MIXED_LABELS, 5, rng.stream(0, "t"), path=str(path))


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path, suffix):
    """A folder is in the place of the file, which no right to write helps, not even that of root."""
    (tmp_path / f"x.{suffix}").mkdir()
    with pytest.raises(UserError, match=rf"--save-partition = .*x\.{suffix}: it cannot be written \(Is a directory\)"):
        save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), tmp_path / f"x.{suffix}", MIXED_LABELS)


@pytest.mark.parametrize("suffix", [".json", ".npz"])
@pytest.mark.parametrize("noise", [False, True])
def test_a_partition_saved_for_other_training_labels_is_refused(tmp_path, suffix, noise):
    """Two labels of the 400 are swapped: lengths, classes and counts stay the same, but the rows mean other images."""
    owned = iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4)
    if noise:
        owned = label_noise(owned, rng.stream(0, "n"), fraction=1.0)
    path = tmp_path / f"partition{suffix}"
    save_partition(owned, path, MIXED_LABELS)
    assert file(MIXED_LABELS, 5, rng.stream(0, "t"), path=str(path)).sha256() == owned.sha256()
    assert unchecked_note(str(path)) == []
    other = MIXED_LABELS.copy()
    row = int(np.flatnonzero(other != other[0])[0])
    other[[0, row]] = other[[row, 0]]
    with pytest.raises(UserError, match=r"partition\.path = .*made for other training labels.*data\.train_samples"):
        file(other, 5, rng.stream(0, "t"), path=str(path))


@pytest.mark.parametrize("noise", [False, True])
def test_a_partition_without_a_digest_is_compared_by_its_labels_unless_they_are_noisy(tmp_path, noise):
    owned = iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4)
    if noise:
        owned = label_noise(owned, rng.stream(0, "n"), fraction=0.5)
    path = tmp_path / "partition.json"
    save_partition(owned, path, MIXED_LABELS)
    content = json.loads(path.read_text())
    del content["labels_sha256"]
    path.write_text(json.dumps(content))
    assert file(MIXED_LABELS, 5, rng.stream(0, "t"), path=str(path)).sha256() == owned.sha256()
    assert "no digest of training labels" in unchecked_note(str(path))[0]
    other = MIXED_LABELS[::-1].copy()
    if noise:
        assert file(other, 5, rng.stream(0, "t"), path=str(path)).sha256() == owned.sha256()
    else:
        with pytest.raises(UserError, match="made for other training labels"):
            file(other, 5, rng.stream(0, "t"), path=str(path))


def test_lists_by_hand_get_a_note_that_they_cannot_be_checked(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text("[[4, 2], [0]]")
    assert unchecked_note(str(path))[0].startswith(f"partition.path = {str(path)!r}: it holds no digest")
