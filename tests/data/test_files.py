"""Data sets in files: what is read, and what is refused before anything starts."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raysim.core.errors import UserError
from raysim.data.files import image_folder, npz, parquet


def encode(pixels: np.ndarray, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def pictures(count: int, shape: tuple[int, ...] = (6, 5, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(count, *shape), dtype=np.uint8)


def write_parquet(path, blobs, label_values, image="image", label="label", label_type=None, as_struct=True, names=None):
    cells = [{"bytes": b, "path": None} for b in blobs] if as_struct else blobs
    table = pa.table({image: cells, label: pa.array(label_values, type=label_type)})
    if names:
        features = {label: {"names": names, "_type": "ClassLabel"}, image: {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)


# --- parquet


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "label"), ("img", "fine_label")])
@pytest.mark.parametrize("as_struct", [True, False])
def test_parquet_folders_keep_the_official_test_split(tmp_path, image, label, as_struct):
    pixels = pictures(12)
    blobs = [encode(p) for p in pixels]
    values = [0, 1, 2] * 4
    keys = {"image": image, "label": label, "as_struct": as_struct}
    write_parquet(tmp_path / "train-00000-of-00002.parquet", blobs[:6], values[:6], **keys)
    write_parquet(tmp_path / "train-00001-of-00002.parquet", blobs[6:9], values[6:9], **keys)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", blobs[9:], values[9:], **keys)
    dataset = parquet(path=str(tmp_path))
    assert (dataset.train_images == pixels[:9].transpose(0, 3, 1, 2)).all()
    assert (dataset.test_images == pixels[9:].transpose(0, 3, 1, 2)).all()
    assert dataset.train_labels_N.tolist() == values[:9] and dataset.test_labels_N.tolist() == values[9:]
    assert dataset.train_labels_N.dtype == np.int64 and dataset.flips and dataset.image_size == (6, 5)


def test_one_parquet_file_is_split_by_class_and_names_come_from_the_hub(tmp_path):
    """Ten images of each of two classes, a fifth set apart: two of each."""
    blobs = [encode(p) for p in pictures(20, (4, 4))]
    write_parquet(tmp_path / "all.parquet", blobs, [0, 1] * 10, names=["cat", "dog"], label_type=pa.int8())
    dataset = parquet(path=str(tmp_path / "all.parquet"), flips=False)
    assert np.bincount(dataset.train_labels_N).tolist() == [8, 8]
    assert np.bincount(dataset.test_labels_N).tolist() == [2, 2]
    assert dataset.class_names == ("cat", "dog") and dataset.channels == 1 and not dataset.flips


def test_jpeg_and_data_subfolders_are_read_and_grey_beside_colour_becomes_colour(tmp_path):
    (tmp_path / "data").mkdir()
    grey, colour = pictures(1, (8, 8))[0], pictures(1, (8, 8, 3))[0]
    write_parquet(tmp_path / "data/train-0.parquet", [encode(grey, "JPEG"), encode(colour)], [0, 1])
    write_parquet(tmp_path / "data/test-0.parquet", [encode(grey)], [1])
    with pytest.raises(UserError, match="training images are 3 x 8 x 8 and test images 1 x 8 x 8"):
        parquet(path=str(tmp_path))
    write_parquet(tmp_path / "data/test-0.parquet", [encode(colour)], [1])
    dataset = parquet(path=str(tmp_path))
    assert dataset.train_images.shape == (2, 3, 8, 8)
    assert (dataset.train_images[0, 0] == dataset.train_images[0, 2]).all()
    assert (dataset.train_images[1] == colour.transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"label_values": [0.0, 1.0, 1.0]}, r"column 'label' holds double, not integers"),
        ({"label_values": ["a", "b", "a"]}, r"column 'label' holds string, not integers"),
        ({"label_values": [0, None, 1]}, r"row 1 has no label \(null\)"),
        ({"label_values": [0, 1, -1]}, r"row 2 has label -1"),
        ({"label_values": [0, 2, 2]}, r"no training image of class 1 of its 3 classes"),
        ({"image": "picture"}, r"no column 'image' or 'img'; the columns are 'picture', 'label'.*data\.image_column"),
        ({"label": "class"}, r"no column 'label' or 'fine_label'; the columns are 'image', 'class'"),
        ({"blobs": [b"nonsense", b"", b""]}, r"train-0\.parquet: row 0: the image cannot be read"),
        ({"blobs": [encode(pictures(1)[0]), encode(pictures(1)[0])[:60], b""]}, r"row 1: the image cannot be read"),
        ({"blobs": [encode(pictures(1)[0]), None, None]}, r"row 1: there is no image \(null\)"),
        ({"blobs": [encode(pictures(1)[0])] * 2 + [encode(pictures(1, (9, 5, 3))[0])]}, r"row 2: .* 9 x 5 .* 6 x 5"),
        ({"blobs": ["a", "b", "c"], "as_struct": False}, r"column 'image' holds string, not image bytes"),
        ({"names": ["only"], "label_values": [0, 1, 1]}, r"label 1 has no name"),
    ],
)
def test_bad_parquet_is_refused_with_the_path_and_the_remedy(tmp_path, keys, message):
    given = {"blobs": [encode(p) for p in pictures(3)], "label_values": [0, 1, 1], **keys}
    write_parquet(tmp_path / "train-0.parquet", **given)
    write_parquet(
        tmp_path / "test-0.parquet",
        [encode(pictures(1)[0])],
        [0],
        given.get("image", "image"),
        given.get("label", "label"),
    )
    with pytest.raises(UserError, match=message) as caught:
        parquet(path=str(tmp_path))
    assert "data.path" in str(caught.value)


def test_a_bad_image_is_named_by_its_own_file_and_row(tmp_path):
    good = [encode(p) for p in pictures(3)]
    write_parquet(tmp_path / "train-0.parquet", good, [0, 1, 1])
    write_parquet(tmp_path / "train-1.parquet", [good[0], b"broken"], [0, 1])
    with pytest.raises(UserError, match=r"train-1\.parquet: row 1: the image cannot be read"):
        parquet(path=str(tmp_path))


def test_sixteen_bit_images_are_refused_rather_than_clipped(tmp_path):
    deep = encode(np.arange(16, dtype=np.uint16).reshape(4, 4) * 4096)
    write_parquet(tmp_path / "all.parquet", [deep] * 4, [0, 1, 0, 1])
    with pytest.raises(UserError, match="more than 8 bits a channel"):
        parquet(path=str(tmp_path / "all.parquet"))


def test_parquet_that_is_absent_empty_or_no_parquet_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.path = .*nowhere.* does not exist"):
        parquet(path=str(tmp_path / "nowhere"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"no train-\*\.parquet in .*holds notes\.txt"):
        parquet(path=str(tmp_path))
    with pytest.raises(UserError, match="cannot be read as parquet"):
        parquet(path=str(tmp_path / "notes.txt"))
    write_parquet(tmp_path / "train-0.parquet", [], [], label_type=pa.int64())
    with pytest.raises(UserError, match=r"not image bytes|no training image"):
        parquet(path=str(tmp_path))


def test_an_empty_table_of_the_right_type_is_refused(tmp_path):
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    pq.write_table(schema.empty_table(), tmp_path / "train-0.parquet")
    with pytest.raises(UserError, match=r"data\.path: parquet holds no training image"):
        parquet(path=str(tmp_path))


# --- folders of images


def write_folder(root, classes: dict[str, int], shape=(5, 4, 3), seed=0):
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for i, pixels in enumerate(pictures(count, shape, seed)):
            (root / name / f"{i:03}.png").write_bytes(encode(pixels))


def test_an_image_folder_with_train_and_test(tmp_path):
    write_folder(tmp_path / "train", {"dog": 3, "ant": 2})
    write_folder(tmp_path / "test", {"dog": 1}, seed=9)
    (tmp_path / "train/dog/notes.txt").write_text("not an image")
    dataset = image_folder(path=str(tmp_path))
    assert dataset.class_names == ("ant", "dog")
    assert dataset.train_labels_N.tolist() == [0, 0, 1, 1, 1] and dataset.test_labels_N.tolist() == [1]
    assert (dataset.test_images[0] == pictures(1, (5, 4, 3), 9)[0].transpose(2, 0, 1)).all()


def test_an_image_folder_of_classes_is_split_by_class(tmp_path):
    write_folder(tmp_path, {"a": 10, "b": 5}, shape=(4, 4))
    dataset = image_folder(path=str(tmp_path), test_fraction=0.4)
    assert np.bincount(dataset.test_labels_N).tolist() == [4, 2] and dataset.channels == 1


def test_a_class_of_one_image_keeps_it_for_training(tmp_path):
    """round(0.9 * 1) = 1 would leave class a without a training image; it is capped at n - 1 = 0."""
    write_folder(tmp_path, {"a": 1, "b": 10}, shape=(4, 4))
    dataset = image_folder(path=str(tmp_path), test_fraction=0.9)
    assert np.bincount(dataset.train_labels_N).tolist() == [1, 1]


def test_bad_image_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.path = .*: no folder in"):
        image_folder(path=str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no image in the class folders"):
        image_folder(path=str(tmp_path))
    write_folder(tmp_path / "x/train", {"a": 2})
    write_folder(tmp_path / "x/test", {"b": 2})
    with pytest.raises(UserError, match="class 'b' is in test/, but not in train/"):
        image_folder(path=str(tmp_path / "x"))
    write_folder(tmp_path / "y", {"a": 2, "b": 2})
    (tmp_path / "y/b/001.png").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"y/b/001\.png: the image cannot be read"):
        image_folder(path=str(tmp_path / "y"))


# --- numpy archives


@pytest.mark.parametrize("layout", ["grey", "last", "first"])
def test_npz_layouts_are_recognised(tmp_path, layout):
    images = pictures(6, {"grey": (4, 7), "last": (4, 7, 3), "first": (3, 4, 7)}[layout])
    values = np.array([[0], [1], [0], [1], [0], [1]], dtype=np.uint8)
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=values, test_images=images, test_labels=values[:, 0])
    dataset = npz(path=str(tmp_path / "d.npz"))
    if layout != "first":
        images = np.moveaxis(images, 3, 1) if layout == "last" else images[:, None]
    assert (dataset.train_images == images).all() and dataset.train_images.shape[2:] == (4, 7)
    assert dataset.test_labels_N.tolist() == [0, 1] * 3 and dataset.test_labels_N.dtype == np.int64
    assert not dataset.flips


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "no array 'train_images'; the arrays are 'x'"),
        ({"train_images": pictures(2), "train_labels": np.array([0.0, 1.0])}, "holds float64, not integers"),
        ({"train_images": pictures(2), "train_labels": np.array([0, -3])}, "row 1 has label -3"),
        ({"train_images": pictures(2) / 255, "train_labels": np.array([0, 1])}, "holds float64; images must be uint8"),
        ({"train_images": pictures(3), "train_labels": np.array([0, 1])}, "holds 3 images for 2 labels"),
        ({"train_images": pictures(2, (4, 4, 2)), "train_labels": np.array([0, 1])}, r"has shape \(2, 4, 4, 2\)"),
        ({"train_images": pictures(2), "train_labels": np.zeros((2, 4), int)}, "one number for each image"),
        ({"train_images": pictures(2), "train_labels": np.array([0, 1]), "test_images": pictures(2)}, "'test_labels'"),
        ({"train_images": pictures(0), "train_labels": np.zeros(0, int)}, "no training image"),
        ({"train_images": np.array([None]), "train_labels": np.array([0])}, "cannot be read"),
    ],
)
def test_bad_npz_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(UserError, match=message) as caught:
        npz(path=str(tmp_path / "d.npz"))
    assert "data.path" in str(caught.value)


def test_npz_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "d.npz").write_text("text")
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name in ("d.npz", "single.npy"):
        with pytest.raises(UserError, match="cannot be read as an npz archive"):
            npz(path=str(tmp_path / name))


def test_an_empty_class_folder_is_named(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    for i in range(3):
        Image.fromarray(np.full((4, 4), i, np.uint8)).save(tmp_path / "cat" / f"{i}.png")
    with pytest.raises(UserError, match=rf"the class folder {tmp_path}/dog holds no image"):
        image_folder(path=str(tmp_path))
