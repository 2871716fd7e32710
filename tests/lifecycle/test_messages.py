"""What a run says before it starts about its memory and its store."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim.config.load import load_config
from raysim.config.schema import Resources
from raysim.core.records import Allocation
from raysim.lifecycle import messages
from raysim.lifecycle.directory import folder_name
from raysim.lifecycle.prepare import Prepared, prepare
from raysim.ui.display import Display


@pytest.fixture
def prepared(small: dict[str, Any]) -> Prepared:
    """300 + 100 digits of 8 x 8 bytes, and a quota of 1,000 images: 25.6 kB and 64 kB."""
    found = prepare(load_config(small))
    quota_KC = np.zeros_like(found.quota_KC)
    quota_KC[0, 0] = 1000
    return replace(found, allocation=Allocation(quota_KC), budget=1000)


@pytest.mark.parametrize("free", [89_600, None])
def test_enough_shared_memory_or_none_at_all_is_not_mentioned(
    prepared: Prepared, free: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(messages, "shared_memory_free_bytes", lambda: free)
    assert messages.shared_memory_note(prepared, Resources()) == []


def test_too_small_a_shared_memory_is_told_with_sizes_and_the_flag_of_docker(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
):
    """25.6 kB + 64 kB = 89.6 kB are needed."""
    monkeypatch.setattr(messages, "shared_memory_free_bytes", lambda: 89_599)
    monkeypatch.setattr(messages, "_mb", lambda size: f"{size} B")
    (note,) = messages.shared_memory_note(prepared, Resources())
    assert "the data set takes 25600 B and the images to make 64000 B, and /dev/shm has 89599 B free" in note
    assert "--shm-size=1g" in note
    monkeypatch.setattr(messages, "store_bytes", lambda _: 25_599)  # the data set will be in files
    monkeypatch.setattr(messages, "shared_memory_free_bytes", lambda: 64_000)
    assert messages.shared_memory_note(prepared, Resources()) == []


def test_a_small_object_store_is_told_before_the_images_are_made(prepared: Prepared, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages, "capacity_bytes", lambda: 89_600)
    assert messages.store_note(prepared) == []
    monkeypatch.setattr(messages, "capacity_bytes", lambda: 64_000)
    assert messages.store_note(prepared, is_mapped=True) == []
    monkeypatch.setattr(messages, "capacity_bytes", lambda: 89_599)
    (note,) = messages.store_note(prepared)
    assert "the rest spills to disk" in note and "resources.object_store_bytes" in note and "--shm-size" in note


def test_the_address_of_the_mlflow_store_is_told_at_the_start(capsys: pytest.CaptureFixture[str]):
    with Display() as display:
        messages.say_start(display, None, Path("runs"), "sqlite:////home/me/mlflow.db")
        messages.say_start(display, None, Path("runs"), "none")
    assert capsys.readouterr().out == "MLflow: sqlite:////home/me/mlflow.db\n"


@pytest.mark.parametrize(
    ("name", "folder"),
    [("quickstart", "quickstart"), ("alpha 0.1, seed=3", "alpha 0.1, seed=3"), ('a"b\n/c', "a_b__c"),
     ("ä" * 200, "ä" * 75), ("x" * 300, "x" * 150)],
)  # fmt: skip
def test_any_name_of_a_file_gives_a_name_of_a_folder(name: str, folder: str):
    assert folder_name(name) == folder
