"""Partitions in files: saved ones come back the same, bad ones are refused."""

import json

import numpy as np
import pytest

from raysim.config.registry import available, resolve
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.data.modifiers import input_noise, label_noise, rare
from raysim.data.partition_file import save_partition
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
        save_partition(modified, path)
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
    save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), path)
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
        save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), tmp_path / "partition.csv")


def test_damaged_offsets_are_refused(tmp_path):
    path = tmp_path / "partition.json"
    save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), path)
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
        save_partition(iid(MIXED_LABELS, 5, rng.stream(0, "t"), clients=4), tmp_path / f"x.{suffix}")
