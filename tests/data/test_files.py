"""Data sets in files: what is read, and what is refused before anything starts."""

import io
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raysim.core.errors import UserError
from raysim.data import decoded_cache
from raysim.data.decoding import decode_images
from raysim.data.files import image_folder, npz, parquet
from raysim.data.reader import Reader, open_reader


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


@pytest.mark.parametrize("second", ["train-00001-of-00002", "test-0"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dog", "cat"], r"class 0 is 'cat' and 'dog'"),  # another order: label 0 would be a cat here, a dog there
        (["cat", "cow"], r"class 1 is 'dog' and 'cow'"),
        (["cat", "dog", "cow"], r"there are 2 and 3 of them"),
    ],
)
def test_files_whose_class_names_differ_are_refused_by_name(tmp_path, second, names, message):
    blobs = [encode(p) for p in pictures(2)]
    first = "train-00000-of-00002" if second.startswith("train") else "train-0"
    write_parquet(tmp_path / f"{first}.parquet", blobs, [0, 1], names=["cat", "dog"])
    write_parquet(tmp_path / f"{second}.parquet", blobs, [0, 1], names=names)
    with pytest.raises(UserError, match=rf"{message} in .*{first}\.parquet and .*{second}\.parquet"):
        parquet(path=str(tmp_path))
    write_parquet(tmp_path / f"{second}.parquet", blobs, [0, 1], names=["cat", "dog"])
    assert parquet(path=str(tmp_path)).class_names == ("cat", "dog")
    write_parquet(tmp_path / f"{second}.parquet", blobs, [0, 1])  # says nothing of names
    assert parquet(path=str(tmp_path)).class_names == ("cat", "dog")


def test_the_label_column_is_one_for_all_files(tmp_path):
    """Coarse labels in training and fine ones in testing would be scored against each other."""
    blobs = [encode(p) for p in pictures(2)]
    write_parquet(tmp_path / "train-0.parquet", blobs, [0, 1])
    write_parquet(tmp_path / "test-0.parquet", blobs, [0, 1], label="fine_label")
    with pytest.raises(UserError, match=r"column 'label', which .*test-0\.parquet lacks .*data\.label_column"):
        parquet(path=str(tmp_path))
    both = pa.table({"image": blobs, "fine_label": [1, 0], "label": [0, 1]})
    pq.write_table(both, tmp_path / "test-0.parquet")
    assert parquet(path=str(tmp_path)).test_labels_N.tolist() == [0, 1]


@pytest.mark.parametrize("twice", ["label", "image"])
def test_two_columns_of_one_name_are_refused(tmp_path, twice):
    columns = {"image": pa.array([encode(p) for p in pictures(4)]), "label": pa.array([0, 1, 0, 1])}
    names = ["image", "label", twice]
    pq.write_table(pa.Table.from_arrays([columns[name] for name in names], names=names), tmp_path / "all.parquet")
    with pytest.raises(UserError, match=rf"all\.parquet has 2 columns named '{twice}'.*data\.{twice}_column"):
        parquet(path=str(tmp_path / "all.parquet"))


def test_paths_are_used_where_the_bytes_of_all_rows_are_null(tmp_path):
    """A column of nulls alone has a type of its own, which is not that of bytes."""
    pixels = pictures(4)
    for i, image in enumerate(pixels):
        (tmp_path / f"{i}.png").write_bytes(encode(image))
    table = pa.table({"image": [{"bytes": None, "path": f"{i}.png"} for i in range(4)], "label": [0, 1, 0, 1]})
    assert pa.types.is_null(table["image"].type.field("bytes").type)
    for name in ("train-0", "test-0"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert (parquet(path=str(tmp_path)).train_images == pixels.transpose(0, 3, 1, 2)).all()


def test_a_column_that_is_called_split_is_said_once(tmp_path):
    blobs = [encode(p) for p in pictures(2)]
    for name in ("train-0", "test-0"):
        pq.write_table(pa.table({"image": blobs, "label": [0, 1], "split": ["a", "b"]}), tmp_path / f"{name}.parquet")
    reader = Reader()
    parquet(reader, path=str(tmp_path))
    assert len(reader.notes) == 1 and "train-0.parquet has a column 'split', which is not read" in reader.notes[0]


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_png_of_sixteen_bits_in_grey_with_alpha_or_colour_is_refused(channels):
    """Written by hand: header 2 x 2 pixels, 16 bits, type 4 (grey, alpha), 2 (RGB) or 6 (RGBA); pillow reads 8 bits."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 2, 2, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = (b"\0" + b"\x80\x01" * 2 * channels) * 2
    blob = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    with pytest.raises(UserError, match="row: more than 8 bits a channel"):
        decode_images(1, [blob].__getitem__, ["row"].__getitem__)


def test_an_archive_of_a_single_class_is_refused(tmp_path):
    np.savez(tmp_path / "d.npz", train_images=pictures(10, (4, 4)), train_labels=np.zeros(10, int))
    with pytest.raises(UserError, match=r"data\.path = .*one class only"):
        npz(path=str(tmp_path / "d.npz"))


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


def test_missing_shards_are_refused_and_named(tmp_path):
    """Files 1, 2 and 7 of 40 are missing."""
    blobs = [encode(p) for p in pictures(2)]
    for n in sorted({*range(40)} - {1, 2, 7}):
        write_parquet(tmp_path / f"train-{n:05}-of-00040.parquet", blobs, [0, 1])
    message = r"the train split in .* lacks 3 of 40 files: number 00001, 00002, 00007 \(-of-00040\)"
    with pytest.raises(UserError, match=message):
        parquet(path=str(tmp_path))
    for n in (1, 2, 7):
        write_parquet(tmp_path / f"train-{n:05}-of-00040.parquet", blobs, [0, 1])
    write_parquet(tmp_path / "test-00001-of-00002.parquet", blobs, [0, 1])
    with pytest.raises(UserError, match=r"the test split in .* lacks 1 of 2 files: number 00000"):
        parquet(path=str(tmp_path))
    write_parquet(tmp_path / "test-00000-of-00002.parquet", blobs, [0, 1])
    assert len(parquet(path=str(tmp_path)).train_labels_N) == 80
    write_parquet(tmp_path / "train-00000-of-00002.parquet", blobs, [0, 1])
    with pytest.raises(UserError, match=r"mixes files of different exports \(1 of 2, 40 of 40\)"):
        parquet(path=str(tmp_path))


def test_one_shard_named_alone_is_read_and_said(tmp_path):
    write_parquet(tmp_path / "train-00001-of-00003.parquet", [encode(p) for p in pictures(10)], [0, 1] * 5)
    reader = Reader()
    assert len(parquet(reader, path=str(tmp_path / "train-00001-of-00003.parquet")).train_labels_N) == 8
    assert reader.notes == [f"{tmp_path}/train-00001-of-00003.parquet is one of 3 files of its split, and the others "
                            "are not read"]


def test_parquet_splits_are_known_in_any_case_and_validation_is_said_or_used(tmp_path):
    pixels = pictures(8)
    blobs = [encode(p) for p in pixels]
    write_parquet(tmp_path / "Train-0.parquet", blobs[:4], [0, 1, 0, 1])
    write_parquet(tmp_path / "Testing-0.parquet", blobs[4:6], [0, 1])
    write_parquet(tmp_path / "validation-0.parquet", blobs[6:], [0, 1])
    write_parquet(tmp_path / "extra-0.parquet", blobs[6:], [0, 1])
    reader = Reader()
    dataset = parquet(reader, path=str(tmp_path))
    assert len(dataset.train_labels_N) == 4 and (dataset.test_images == pixels[4:6].transpose(0, 3, 1, 2)).all()
    assert reader.notes[0].endswith("that are not read: extra-0.parquet")
    assert reader.notes[1].startswith("validation-0.parquet is a validation split and is not read")
    tested = parquet(path=str(tmp_path), validation="test")
    assert (tested.test_images == pixels[6:].transpose(0, 3, 1, 2)).all() and len(tested.train_labels_N) == 4
    trained = parquet(path=str(tmp_path), validation="train")
    assert len(trained.train_labels_N) == 6 and (trained.test_images == dataset.test_images).all()
    write_parquet(tmp_path / "training-0.parquet", blobs[:4], [0, 1, 0, 1])
    with pytest.raises(UserError, match="both mean the train split"):
        parquet(path=str(tmp_path))


def test_the_only_folder_is_entered(tmp_path):
    (tmp_path / "plain_text").mkdir()
    write_parquet(tmp_path / "plain_text/train-0.parquet", [encode(p) for p in pictures(10)], [0, 1] * 5)
    reader = Reader()
    assert len(parquet(reader, path=str(tmp_path)).train_labels_N) == 8
    assert reader.notes == [f"data.path = {str(tmp_path)!r}: the files are read from {tmp_path}/plain_text, the only "
                            "folder in it"]


def test_parquet_files_in_a_second_place_are_said(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-0.parquet", "data/train-0.parquet"):
        write_parquet(tmp_path / name, [encode(p) for p in pictures(10)], [0, 1] * 5)
    reader = Reader()
    assert len(parquet(reader, path=str(tmp_path)).train_labels_N) == 8
    assert reader.notes == [f"parquet files in {tmp_path} that are not read: data/train-0.parquet"]


@pytest.mark.parametrize("with_bytes", [True, False])
def test_images_named_by_their_path_are_read_beside_the_parquet_file(tmp_path, monkeypatch, with_bytes):
    """Struct {bytes: null, path: images/0.png}, or of paths alone; changed files are not taken from a cache."""
    monkeypatch.setattr(decoded_cache, "LEAST_BYTES", 1)
    (tmp_path / "images").mkdir()
    pixels = pictures(4, (40, 40, 3))
    for i, p in enumerate(pixels):
        (tmp_path / f"images/{i}.png").write_bytes(encode(p))
    fields = [("bytes", pa.binary())] if with_bytes else []
    kind = pa.struct([*fields, ("path", pa.string())])
    cells = [{"path": f"images/{i}.png", **({"bytes": None} if with_bytes else {})} for i in range(4)]
    if with_bytes:
        cells[3] = {"bytes": encode(pixels[3]), "path": "elsewhere.png"}  # bytes go before the path
    table = pa.table({"image": pa.array(cells, type=kind), "label": [0, 1, 0, 1]})
    pq.write_table(table, tmp_path / "train-0.parquet")
    pq.write_table(table, tmp_path / "test-0.parquet")
    keys = {"path": str(tmp_path)}
    cache = open_reader(str(tmp_path / "cache"), [])
    assert (parquet(cache, **keys).train_images == pixels.transpose(0, 3, 1, 2)).all()
    (tmp_path / "images/2.png").write_bytes(encode(pixels[0]))
    assert (parquet(cache, **keys).train_images[2] == pixels[0].transpose(2, 0, 1)).all()
    (tmp_path / "images/1.png").unlink()
    with pytest.raises(UserError, match=r"row 1 holds no image, only the path of a file, and .*images/1\.png is not"):
        parquet(cache, **keys)


# --- what a viewer shows


def saved(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def decode(*blobs: bytes) -> np.ndarray:
    return decode_images(len(blobs), lambda i: blobs[i], str)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_as_the_camera_noted(orientation):
    """EXIF orientations 1 to 8 are the symmetries of the square; 6 is turned by a quarter clockwise to be upright."""
    stored = pictures(1, (4, 3, 3))[0]
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: stored, 2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1],
        5: stored.transpose(1, 0, 2), 6: np.rot90(stored, -1), 7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored),
    }[orientation]
    found = decode(saved(Image.fromarray(stored), "PNG", exif=exif))
    assert (found[0] == upright.transpose(2, 0, 1)).all()
    jpeg = decode(saved(Image.fromarray(stored), "JPEG", exif=exif))
    assert jpeg.shape == found.shape


def test_broken_exif_data_leave_a_sound_image_as_it_is():
    pixels = pictures(1, (4, 3, 3))[0]
    broken = saved(Image.fromarray(pixels), "PNG", exif=b"Exif\x00\x00nonsense")
    assert (decode(broken)[0] == pixels.transpose(2, 0, 1)).all()


def test_a_shape_in_alpha_alone_is_seen_on_white():
    """A black square whose alpha is 0, 255, 51: white, black, and 255 - 51 = 204."""
    alpha = np.array([[0, 255], [51, 0]], np.uint8)
    expected = np.array([[255, 0], [204, 255]], np.uint8)
    black = np.zeros((2, 2, 3), np.uint8)
    rgba = Image.fromarray(np.dstack([black, alpha]))
    grey = Image.merge("LA", [Image.fromarray(black[..., 0]), Image.fromarray(alpha)])
    assert (decode(saved(rgba, "PNG"))[0] == expected).all()
    assert decode(saved(grey, "PNG")).shape == (1, 1, 2, 2)  # grey stays grey
    assert (decode(saved(grey, "PNG"))[0, 0] == expected).all()


def test_transparent_colours_of_palettes_and_of_plain_images_are_white():
    indexed = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    indexed.putpalette([10, 20, 30, 40, 50, 60])
    assert decode(saved(indexed, "PNG", transparency=0))[0, 0].tolist() == [[255, 40], [40, 255]]
    grey = Image.fromarray(np.array([[7, 9]], np.uint8))
    assert decode(saved(grey, "PNG", transparency=7))[0, 0].tolist() == [[255, 9]]


def test_opaque_alpha_changes_nothing():
    pixels = pictures(1, (3, 3, 4))[0]
    pixels[..., 3] = 255
    assert (decode(saved(Image.fromarray(pixels), "PNG"))[0] == pixels[..., :3].transpose(2, 0, 1)).all()


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


@pytest.mark.parametrize("prefix", ["val", "validation", "valid"])
def test_validation_arrays_are_said_and_can_be_used(tmp_path, prefix):
    values = np.array([0, 1, 0, 1])
    parts = {part: pictures(4, (4, 7), seed) for seed, part in enumerate(("train", "test", prefix))}
    arrays = {f"{part}_images": images for part, images in parts.items()}
    np.savez(tmp_path / "d.npz", **arrays, **{f"{part}_labels": values for part in parts}, weights=np.zeros(3))
    path, reader = str(tmp_path / "d.npz"), Reader()
    dataset = npz(reader, path=path)
    assert (dataset.test_images[:, 0] == parts["test"]).all() and len(dataset.train_labels_N) == 4
    assert reader.notes[0].startswith(f"{prefix}_images in {path} is a validation split and is not read")
    assert reader.notes[1] == f"arrays in {path} that are not read: weights"
    assert (npz(path=path, validation="test").test_images[:, 0] == parts[prefix]).all()
    trained = npz(path=path, validation="train")
    assert (trained.train_images[4:, 0] == parts[prefix]).all() and trained.train_labels_N.tolist() == [0, 1] * 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "no array 'train_images'; the arrays are 'x'"),
        ({"train_images": pictures(2), "train_labels": np.array([0.0, 1.0])}, "holds float64, not integers"),
        ({"train_images": pictures(2), "train_labels": np.array([0, -3])}, "row 1 has label -3"),
        ({"train_images": pictures(2) / 255, "train_labels": np.array([0, 1])}, "holds float64; images must be uint8"),
        ({"train_images": pictures(3), "train_labels": np.array([0, 1])}, "holds 3 images for 2 labels"),
        ({"train_images": pictures(2, (4, 4, 2)), "train_labels": np.array([0, 1])}, r"has shape \(2, 4, 4, 2\)"),
        (
            {"train_images": pictures(2, (3, 9, 3)), "train_labels": np.array([0, 1])},
            r"has shape \(2, 3, 9, 3\), which can be read with the channels second or last",
        ),
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


@pytest.mark.parametrize("classes", [["cat"], ["cat", "dog"]])
def test_class_folders_of_files_that_are_not_read_say_what_they_hold(tmp_path, classes):
    """The last of the classes has photographs in a phone's format, and only these."""
    for name in classes:
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(np.full((4, 4), i, np.uint8)).save(tmp_path / name / f"{i}.png")
    for file in (tmp_path / classes[-1]).iterdir():
        file.rename(file.with_suffix(".HEIC"))
    with pytest.raises(UserError, match=r"but 3 \.heic, which are not read; convert these to PNG or JPEG"):
        image_folder(path=str(tmp_path), classes=classes)
