"""`raysim cache`: what is there, how large it is, and how much clearing freed."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from raysim.cli import commands
from raysim.core.errors import UserError
from raysim.data.reader import open_reader
from raysim.generation.image_cache import ImageCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1,200 images of 1,000 bytes and 24 bytes of key, and a damaged segment of another seed."""
    keys_M3 = np.stack([np.arange(1200)] * 3, axis=1)
    cache = ImageCache.open(tmp_path, "ab" * 32, 3, (1, 20, 50))
    cache.add(keys_M3, np.zeros((1200, 1, 20, 50), np.uint8))
    ImageCache.open(tmp_path, "ab" * 32, 4, (1, 20, 50))
    (tmp_path / ("ab" * 16) / "4" / "x.seg").write_bytes(b"garbage")
    return tmp_path


def call(*arguments: str) -> str:
    result = CliRunner().invoke(commands, ["cache", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_list_shows_generator_seed_images_and_size(folder: Path):
    lines = call("list", "--dir", str(folder)).splitlines()
    assert lines[1].split() == ["ab" * 16, "3", "1,200", "1.2", "MB"]
    assert "1 damaged" in lines[2]
    assert lines[-1] == f"{folder}: 1,200 images, 1.2 MB"


def test_clear_asks_nothing_and_says_what_it_freed(folder: Path):
    assert call("clear", "--dir", str(folder)) == f"{folder}: 1.2 MB freed\n"
    assert call("list", "--dir", str(folder)) == f"{folder}: no cached images\n"
    assert call("clear", "--dir", str(folder)) == f"{folder}: 0.0 MB freed\n"


def test_decoded_data_sets_are_listed_and_cleared_beside_synthetic_images(folder: Path):
    """500 images of 2,000 bytes; a file whose header is damaged holds an unknown number."""
    open_reader(str(folder), []).decoded(lambda: [b"some data set"], lambda: np.zeros((500, 1, 40, 50), np.uint8))
    (path,) = (folder / "decoded").glob("*.img")
    (folder / "decoded" / "other.img").write_bytes(b"garbage")
    (folder / "decoded" / "mine.txt").write_text("not the cache's")
    lines = call("list", "--dir", str(folder)).splitlines()
    assert sorted(line.split()[0] for line in lines[3:5]) == sorted([path.stem, "other"])
    assert [path.stem, "decoded", "500", "1.0", "MB"] in [line.split() for line in lines]
    assert sum("damaged, deleted when met" in line for line in lines) == 2
    assert lines[-1] == f"{folder}: 1,700 images, 2.2 MB"
    assert call("clear", "--dir", str(folder)) == f"{folder}: 2.2 MB freed\n"
    assert [p.name for p in (folder / "decoded").iterdir()] == ["mine.txt"]


def test_the_folder_is_by_default_that_of_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call("list") == f"{tmp_path}/.cache/raysim/images: no cached images\n"


def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path: Path):
    for command in ("list", "clear"):
        with pytest.raises(UserError, match=r"--dir = .*nowhere: no such folder"):
            call(command, "--dir", str(tmp_path / "nowhere"))
