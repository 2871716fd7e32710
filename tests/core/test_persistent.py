"""Results of a job outlive the working directory that Ray deletes with it."""

from pathlib import Path

import pytest

from raysim.core.persistent import persistent_folder, persistent_path


def test_a_relative_path_begins_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert persistent_path("runs") == tmp_path / "runs"
    assert persistent_path("/a/runs") == Path("/a/runs")
    assert persistent_path("~/runs") == Path.home() / "runs"


def test_in_the_copy_that_ray_made_for_a_job_it_begins_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1234"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert persistent_folder() == tmp_path / "me"
    assert persistent_path("runs") == tmp_path / "me" / "runs"
