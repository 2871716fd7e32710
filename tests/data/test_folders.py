"""Folders of images: which folders are splits, which are classes, and what is refused rather than guessed."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raysim.core.errors import UserError
from raysim.data.files import image_folder
from raysim.data.folders import count_note
from raysim.data.reader import Reader
from raysim.data.split_names import split_of, splits_of


def fill(root: Path, counts: Mapping[str, int], first: int = 0) -> Path:
    """Folders with so many grey images of 2 x 2 pixels; each image has a value of its own, counting from `first`."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(np.full((2, 2), first, np.uint8)).save(root / name / f"{i:03}.png")
            first += 1
    return root


def read(root: Path, **keys: object):
    """(the data set, its notes)."""
    reader = Reader()
    return image_folder(reader, path=str(root), **keys), reader.notes  # type: ignore[arg-type]


def values(images: np.ndarray) -> list[int]:
    return images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Train", "train"), ("training", "train"), ("TRAINING_SET", "train"), ("trn", "train"),
        ("test", "test"), ("Testing", "test"), ("test-images", "test"),
        ("val", "validation"), ("Valid", "validation"), ("validation", "validation"), ("val_images", "validation"),
        ("cat", None), ("trains", None), ("tester", None), ("contest", None), ("images", None), ("", None),
    ],
)
def test_the_usual_names_of_splits_are_known_in_any_case(name: str, split: str | None):
    assert split_of(name) == split


@pytest.mark.parametrize(("train", "test"), [("Train", "Test"), ("training", "testing"), ("Train", "test")])
def test_splits_are_splits_however_they_are_spelled(tmp_path: Path, train: str, test: str):
    fill(tmp_path / train, {"ant": 2, "bee": 1})
    fill(tmp_path / test, {"ant": 1, "bee": 2}, first=100)
    dataset, notes = read(tmp_path)
    assert dataset.class_names == ("ant", "bee") and values(dataset.train_images) == [0, 1, 2]
    assert values(dataset.test_images) == [100, 101, 102] and dataset.test_labels_N.tolist() == [0, 1, 1]
    assert notes == [f"{tmp_path}: 2 classes: ant 2 + 1, bee 1 + 2 (train + test)"]


def test_a_split_beside_classes_is_asked_about_and_both_answers_work(tmp_path: Path):
    fill(tmp_path, {"ant": 5, "bee": 5})
    fill(tmp_path / "val", {"ant": 1, "bee": 1}, first=50)
    with pytest.raises(UserError, match=r"'val' is named like a split and stands beside 'ant', 'bee'.*data\.classes"):
        read(tmp_path)
    left_out, notes = read(tmp_path, classes=["ant", "bee"])
    assert left_out.class_names == ("ant", "bee") and len(left_out.train_labels_N) == 8
    assert any("no class and are not read: 'val'" in note for note in notes)
    used, _ = read(tmp_path, splits={"train": ".", "validation": "val"}, validation="test")
    assert used.class_names == ("ant", "bee") and values(used.test_images) == [50, 51]
    assert len(used.train_labels_N) == 10


def test_a_class_may_be_called_train(tmp_path: Path):
    fill(tmp_path, {"car": 5, "train": 5})
    with pytest.raises(UserError, match=r"data\.classes=\[car, train\]"):
        read(tmp_path)
    dataset, _ = read(tmp_path, classes=["train", "car"])
    assert dataset.class_names == ("train", "car")  # numbered as given
    assert values(dataset.train_images[dataset.train_labels_N == 0])[0] >= 5


def test_a_class_called_like_a_split_inside_a_split_is_asked_about(tmp_path: Path):
    fill(tmp_path / "train", {"car": 2, "test": 2})
    with pytest.raises(UserError, match=r"the class 'test' in .*/train is named like a split"):
        read(tmp_path)
    assert read(tmp_path, classes=["car", "test"])[0].class_names == ("car", "test")


def test_two_folders_for_one_split_and_a_split_without_class_folders_are_refused(tmp_path: Path):
    fill(tmp_path / "two/train", {"a": 1, "b": 1})
    fill(tmp_path / "two/training", {"a": 1, "b": 1})
    with pytest.raises(UserError, match=r"'train' and 'training' both mean the train split.*data\.splits"):
        read(tmp_path / "two")
    assert len(read(tmp_path / "two", splits={"train": "training"})[0].train_labels_N) == 2
    fill(tmp_path / "flat", {"train": 2, "test": 2})
    with pytest.raises(UserError, match="'test' is named like a split but holds images without a folder per class"):
        read(tmp_path / "flat")
    fill(tmp_path / "lone/test", {"a": 1, "b": 1})
    with pytest.raises(UserError, match=r"there is 'test' and no folder called train.*data\.splits"):
        read(tmp_path / "lone")


def test_wrapping_folders_are_entered_and_said(tmp_path: Path):
    fill(tmp_path / "a/b", {"ant": 5, "bee": 5})
    (tmp_path / "__MACOSX/ant").mkdir(parents=True)
    dataset, notes = read(tmp_path)
    assert dataset.class_names == ("ant", "bee")
    assert notes[0].endswith(f"the images are read from {tmp_path / 'a/b'}, the only folder in {tmp_path}")
    fill(tmp_path / "c/wrapped/train/images", {"ant": 1, "bee": 1})
    fill(tmp_path / "c/wrapped/test/images", {"ant": 1}, first=9)
    assert values(read(tmp_path / "c")[0].test_images) == [9]


def test_one_class_alone_is_asked_about(tmp_path: Path):
    fill(tmp_path, {"ant": 5})
    with pytest.raises(UserError, match=r"one class only, the folder 'ant'.*data\.classes=\[ant\]"):
        read(tmp_path)
    assert read(tmp_path, classes=["ant"])[0].classes == 1


@pytest.mark.parametrize("kind", [".ipynb_checkpoints", "__MACOSX", ".git", "@eaDir"])
def test_folders_made_by_machines_are_no_classes_at_any_depth(tmp_path: Path, kind: str):
    """Such a folder sorts before `ant`: as class 0 it would shift all labels by one."""
    fill(tmp_path, {"ant": 5, "bee": 5, kind: 3, f"ant/{kind}": 2})
    dataset, _ = read(tmp_path)
    assert dataset.class_names == ("ant", "bee")
    assert len(dataset.train_labels_N) + len(dataset.test_labels_N) == 10


def test_resource_forks_are_no_images(tmp_path: Path):
    fill(tmp_path, {"ant": 5, "bee": 5})
    (tmp_path / "ant/._000.png").write_bytes(b"Mac OS X resource fork")
    assert len(read(tmp_path)[0].train_labels_N) == 8


@pytest.mark.parametrize("name", ["val", "Validation", "valid"])
def test_a_validation_split_is_said_and_can_be_used(tmp_path: Path, name: str):
    fill(tmp_path / "train", {"a": 2, "b": 2})
    fill(tmp_path / "test", {"a": 1, "b": 1}, first=50)
    fill(tmp_path / name, {"a": 1, "b": 1}, first=80)
    dataset, notes = read(tmp_path)
    assert values(dataset.train_images) == [0, 1, 2, 3] and values(dataset.test_images) == [50, 51]
    assert f"{tmp_path / name} is a validation split and is not read; data.validation=test" in notes[0]
    trained, notes = read(tmp_path, validation="train")
    assert values(trained.train_images) == [0, 1, 2, 3, 80, 81]
    assert trained.train_labels_N.tolist() == [0, 0, 1, 1, 0, 1]
    assert len(notes) == 1
    tested, notes = read(tmp_path, validation="test")
    assert values(tested.train_images) == [0, 1, 2, 3] and values(tested.test_images) == [80, 81]
    assert notes[0] == f"{tmp_path / 'test'} is not read, because data.validation=test tests on {tmp_path / name}"


def test_a_validation_split_that_is_not_there_is_refused(tmp_path: Path):
    fill(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(UserError, match=r"data\.validation = 'test': there is no validation split"):
        read(tmp_path, validation="test")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"classes": ["ant", "cow"]}, r"data\.classes: 'cow' is no folder in .*its folders: ant, bee"),
        ({"classes": ["ant", "ant"]}, r"must name each class once"),
        ({"classes": []}, r"at least one"),
        ({"splits": {"test": "ant"}}, r"the folder of `train` is missing"),
        ({"splits": {"train": "ant", "test": "cow"}}, r"data\.splits: test = 'cow' is no folder"),
        ({"splits": {"train": "ant", "test": "./ant"}}, r"two splits are one folder"),
    ],
)
def test_classes_and_splits_that_are_not_there_are_refused(tmp_path: Path, keys: dict[str, object], message: str):
    fill(tmp_path, {"ant": 2, "bee": 2})
    with pytest.raises(UserError, match=message):
        read(tmp_path, **keys)


def test_what_is_not_read_is_said(tmp_path: Path):
    fill(tmp_path, {"ant": 5, "bee": 5, ".": 2})
    (tmp_path / "ant/shot.heic").write_bytes(b"")
    (tmp_path / "ant/notes.txt").write_text("text needs no word")
    notes = read(tmp_path)[1]
    assert notes[0] == f"2 images in {tmp_path} itself, in no class folder, are not read"
    assert notes[1] == f"files in {tmp_path} of types that are not read: 1 .heic"
    fill(tmp_path / "s/train", {"a": 1, "b": 1})
    (tmp_path / "s/docs").mkdir()
    assert read(tmp_path / "s")[1][0].endswith("are no class and are not read: 'docs'")


def test_dangling_links_and_folders_named_like_images_are_refused(tmp_path: Path):
    fill(tmp_path / "x", {"a": 2, "b": 2})
    (tmp_path / "x/b/lost.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match=rf"lost\.png is a link to {tmp_path}/nowhere\.png, where nothing is"):
        read(tmp_path / "x")
    fill(tmp_path / "y", {"a": 2, "b": 2, "b/x.png": 1})
    with pytest.raises(UserError, match=r"b/x\.png is a folder though it is named like an image"):
        read(tmp_path / "y")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"it is a link to .*nothing, where nothing is"):
        read(tmp_path / "link")


@pytest.mark.parametrize("name", ["test", "c", "train/c", "train/a/more"])
def test_a_link_that_leads_nowhere_is_no_missing_split_or_class(tmp_path: Path, name: str):
    """Were it passed over, a class would be lost, or a test split cut from the training images."""
    fill(tmp_path / "train", {"a": 2, "b": 2})
    (tmp_path / name).symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=rf"{name} is a link to {tmp_path}/unmounted, where nothing is"):
        read(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / "train/a/notes.txt").symlink_to(tmp_path / "unmounted")  # text is not read anyhow
    assert len(read(tmp_path)[0].train_labels_N) == 4


def test_a_test_split_without_labels_can_be_left_out(tmp_path: Path):
    fill(tmp_path, {"train/a": 2, "train/b": 2, "test/unknown": 3})
    with pytest.raises(UserError, match=r"'unknown' is in test/, but not in train/.*data\.splits=\{train: train/\}"):
        read(tmp_path)
    assert len(read(tmp_path, splits={"train": "train/"})[0].train_labels_N) == 4


def test_linked_folders_are_read_once_and_a_loop_of_links_ends(tmp_path: Path):
    fill(tmp_path / "x", {"a": 4, "b": 4})
    fill(tmp_path, {"elsewhere": 1}, first=200)
    (tmp_path / "x/a/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "x/b/loop").symlink_to(tmp_path / "x/b")
    dataset, _ = read(tmp_path / "x", test_fraction=0.01)
    assert np.bincount(dataset.train_labels_N).tolist() == [5, 4] and 200 in values(dataset.train_images)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path, {"a": 2, "b": 2})

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"a/000\.png cannot be read \(Permission denied\)"):
        read(tmp_path)


def test_many_classes_are_counted_in_one_short_line():
    line = count_note([f"c{i}" for i in range(100)], {"train": range(100)})
    assert line.startswith("100 classes: c0 0, c1 1") and line.endswith("c9 9, ... 89 more ..., c99 99 (train)")
    assert len(re.findall(r"c\d+ \d+", line)) == 11


def test_folders_named_by_numbers_are_numbered_as_text_which_is_said(tmp_path: Path):
    """As text, 10 comes before 2: the order is 0, 1, 10, 2."""
    fill(tmp_path, {"0": 1, "1": 1, "2": 1, "10": 1})
    dataset, notes = read(tmp_path)
    assert dataset.class_names == ("0", "1", "10", "2")
    assert notes[0].startswith("classes are numbered in the order of their names as text, so the folder '10' is class")
    ordered, notes = read(tmp_path, classes=["0", "1", "2", "10"])
    assert ordered.class_names == ("0", "1", "2", "10") and len(notes) == 1


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["seg_train", "seg_test", "seg_pred"], {"seg_train": "train", "seg_test": "test"}),
        (["images-Train", "images-val"], {"images-Train": "train", "images-val": "validation"}),
        (["train_photos", "test_photos"], {"train_photos": "train", "test_photos": "test"}),
        (["bullet_train", "test_tube", "train_station"], {}),  # no two are alike but for the split
        (["a_test", "a_val"], {}),  # no training among them
    ],
)
def test_names_that_are_alike_but_for_a_split_are_splits(names: list[str], splits: dict[str, str]):
    assert splits_of(names) == splits


def test_splits_named_by_their_last_word_in_folders_of_the_same_name_are_read(tmp_path: Path):
    """As a class folder, `seg_train` would mix all classes into one."""
    fill(tmp_path / "seg_train/seg_train", {"ant": 2, "bee": 1})
    fill(tmp_path / "seg_test/seg_test", {"ant": 1, "bee": 1}, first=50)
    dataset, _ = read(tmp_path)
    assert dataset.class_names == ("ant", "bee") and dataset.train_labels_N.tolist() == [0, 0, 1]
    assert values(dataset.test_images) == [50, 51]
    fill(tmp_path, {"seg_pred/seg_pred": 2})
    with pytest.raises(UserError, match=r"'seg_pred'; .*data\.splits=\{train: seg_train\}"):
        read(tmp_path)
    again, _ = read(tmp_path, splits={"train": "seg_train", "test": "seg_test"})
    assert again.class_names == ("ant", "bee") and values(again.test_images) == [50, 51]


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["ant/train", "ant/test", "bee/train", "bee/test"], r"'ant' .* holds '(test|train)', .*named like a split"),
        (["ant/part_train", "ant/part_test", "bee"], r"'ant' .* holds 'part_test', 'part_train', named like a split"),
        (["ant", "bee", "data/train/ant", "data/train/bee"], r"'data' .* holds 'train', named like a split"),
        (["ant", "bee", "data/all/train/ant"], r"'data' .* holds 'train', named like a split, in .*data/all"),
        (["ant", "bee", "copy/ant", "copy/bee"], r"'copy' .* holds the folders 'ant', 'bee' with images"),
        (["ant", "bee", "copy/images/ant", "copy/images/bee"], r"'copy' .*'ant', 'bee' with images in .*copy/images"),
        (["fold1/ant", "fold1/bee", "fold2/ant", "fold2/bee"], r"'fold1' .*'ant', 'bee' .*, as 'fold2' does"),
        (["fold1/ant", "fold1/bee", "fold1", "fold2/ant", "fold2/bee"], r"'fold1' .*, as 'fold2' does"),
        (["train/ant", "train/bee", "test/ant/one", "test/ant/two", "test/bee"], r"'ant' in .*test holds .*'one'"),
    ],
)
def test_class_folders_that_hold_splits_folds_or_classes_are_refused(tmp_path: Path, folders: list[str], message: str):
    fill(tmp_path, dict.fromkeys(folders, 2))
    with pytest.raises(UserError, match=message + r".*data\.classes=\["):
        read(tmp_path)


def test_one_folder_in_each_class_and_folders_beside_images_are_read(tmp_path: Path):
    fill(tmp_path / "x", {"ant/images": 2, "bee/images": 2, "ant/empty": 0})
    assert read(tmp_path / "x")[0].class_names == ("ant", "bee")
    fill(tmp_path / "y", {"ant": 1, "ant/more": 1, "ant/yet_more": 1, "bee": 2})
    assert read(tmp_path / "y")[0].class_names == ("ant", "bee")
    fill(tmp_path / "z", {"ant/wings/left": 1, "ant/wings/right": 1, "bee": 2})
    with pytest.raises(UserError, match=r"'left', 'right'"):
        read(tmp_path / "z")
    assert read(tmp_path / "z", classes=["ant", "bee"])[0].class_names == ("ant", "bee")


def test_images_without_a_suffix_are_counted_and_said(tmp_path: Path):
    fill(tmp_path, {"ant": 3, "bee": 2})
    (tmp_path / "ant/002.png").rename(tmp_path / "ant/002")
    (tmp_path / "ant/LICENSE").write_text("text needs no word")
    dataset, notes = read(tmp_path)
    assert f"files in {tmp_path} of types that are not read: 1 images without a suffix" in notes
    assert len(dataset.train_labels_N) + len(dataset.test_labels_N) == 4
