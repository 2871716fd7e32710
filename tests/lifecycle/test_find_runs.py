"""Finding the runs of a configuration in an output folder."""

import os

from raysim.lifecycle.directory import RunDirectory
from raysim.lifecycle.find_runs import RunIndex


def test_the_runs_of_one_configuration_come_newest_first_and_damaged_ones_are_named(tmp_path):
    ours, theirs = '{"config_hash": "a"}', '{"config_hash": "b"}'
    contents = {"new": ours, "other": theirs, "old": ours, "broken": "{", "list": "[]"}
    for age, (name, content) in enumerate(contents.items()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
        os.utime(tmp_path / name / "run.json", (1e9 - age, 1e9 - age))
    (tmp_path / "empty").mkdir()
    said: list[str] = []
    index = RunIndex(tmp_path, said.append)
    assert index.of("a") == [RunDirectory(tmp_path / "new"), RunDirectory(tmp_path / "old")]
    assert [text.split("/")[-2] for text in said] == ["broken", "list"] == [t.split()[-4] for t in said]
    assert RunIndex(tmp_path / "missing").of("a") == []


def test_a_run_that_is_added_is_found_once_and_is_the_newest(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"config_hash": "a"}')
    index = RunIndex(tmp_path)
    os.utime(tmp_path / "first" / "run.json", (2e9, 2e9))
    index.add(RunDirectory(tmp_path / "first"))
    index.add(RunDirectory(tmp_path / "first"))
    assert [run.path.name for run in index.of("a")] == ["first", "second"]
