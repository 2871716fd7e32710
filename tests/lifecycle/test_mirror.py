"""A run's folder is kept at another place, goes on from there on a new machine, and never depends on it."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from full_disk import Disk

import raysim
from raysim import Result
from raysim.commands.sweep.sweep import run_sweep
from raysim.core.errors import ConfigError, DiskError, UserError
from raysim.lifecycle.mirror import Mirror, check_mirror, fetch
from raysim.ui.display import Display

Run = Callable[..., Result]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace("_npy", ".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finished(mirror: Mirror) -> str:
    mirror.finish()
    return mirror.problem


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a-20260101-000000-abcd"
    write(folder, run_json='{"config_hash": "h"}', history__m_npy="1", checkpoints__r1_json="c1")
    return folder


# The files


def test_only_what_changed_is_copied_and_old_checkpoints_go(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copied: list[str] = []
    system = type(fsspec.filesystem("file"))
    put = system.put_file
    monkeypatch.setattr(system, "put_file", lambda s, a, b: (copied.append(Path(a).name), put(s, a, b)))
    address = f"file://{tmp_path}/there"
    assert finished(Mirror(address, run_folder)) == ""
    assert copied == ["m.npy", "run.json", "r1.json"]  # what refers to others comes last
    write(run_folder, history__m_npy="12", checkpoints__r2_json="c2")
    mirror = Mirror(address, run_folder)
    mirror.update()
    (run_folder / "checkpoints/r1.json").unlink()
    assert finished(mirror) == ""
    assert tree(tmp_path / "there" / run_folder.name) == tree(run_folder)
    assert copied.count("r2.json") == 1


def test_a_checkpoint_there_stays_until_a_newer_one_is_there(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second checkpoint is already replaced by a third one when it is to be copied."""
    there = tmp_path / "there" / run_folder.name
    assert finished(Mirror(str(tmp_path / "there"), run_folder)) == ""
    checkpoints = run_folder / "checkpoints"
    (checkpoints / "r1.json").rename(checkpoints / "r2.json")
    system = type(fsspec.filesystem("file"))
    put = system.put_file
    seen: list[list[str]] = []

    def slow(place: Any, source: str, target: str) -> None:
        if source.endswith("r2.json"):
            (checkpoints / "r2.json").rename(checkpoints / "r3.json")
        seen.append(sorted(path.name for path in (there / "checkpoints").iterdir()))
        put(place, source, target)

    monkeypatch.setattr(system, "put_file", slow)
    mirror = Mirror(str(tmp_path / "there"), run_folder)
    mirror.update()
    assert finished(mirror) == ""
    assert all("r1.json" in names for names in seen)
    assert tree(there) == tree(run_folder)


def test_files_that_a_writer_is_not_done_with_stay_at_home(run_folder: Path, tmp_path: Path):
    names = [".lock", ".summary.json.1.tmp", "checkpoints/.tmpx", "checkpoints/round-1.arrays"]
    for name in names:
        (run_folder / name).write_text("")
    assert finished(Mirror(str(tmp_path / "there"), run_folder)) == ""
    assert not tree(tmp_path / "there" / run_folder.name).keys() & set(names)


def test_a_place_through_fsspec_takes_and_gives_the_same_files(run_folder: Path, tmp_path: Path):
    """As an object store does: there are no folders, and a file is there whole or not at all."""
    memory = fsspec.filesystem("memory")
    try:
        check_mirror("memory://bucket/prefix", str(tmp_path / "runs"))
        assert memory.find("/bucket") == []
        assert finished(Mirror("memory://bucket/prefix", run_folder)) == ""
        said: list[str] = []
        fetch("memory://bucket/prefix", tmp_path / "new", {"h"}, said.append)
        assert tree(tmp_path / "new" / run_folder.name) == tree(run_folder)
        assert said == [f"fetching {run_folder.name} from memory://bucket/prefix"]
    finally:
        memory.rm("/bucket", recursive=True)


def test_of_a_configuration_the_newest_run_is_fetched_and_no_other(run_folder: Path, tmp_path: Path):
    there = tmp_path / "there"
    for name, content in {
        "b-20260101-000001-0000": '{"config_hash": "h"}', "c-20251231-000000-0000": '{"config_hash": "h"}',
        "d-20260102-000000-0000": '{"config_hash": "other"}', "e-20260102-000000-0000": "{", "f": "[]",
    }.items():
        write(there / name, run_json=content)
    fetch(str(there), tmp_path / "new", {"h"}, lambda _: None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b-20260101-000001-0000"]


def test_an_address_with_signs_of_a_pattern_in_it_is_found_again(run_folder: Path, tmp_path: Path):
    there = str(tmp_path / "with [x]* in it")
    assert finished(Mirror(there, run_folder)) == ""
    write(tmp_path / "with [x]* in it", notes="no run", other__x_json="{}")
    root = tmp_path / "elsewhere"
    fetch(there, root, {"h"}, lambda _: None)
    assert tree(root / run_folder.name) == tree(run_folder)
    fetch(f"file://{tmp_path}/not/there", root, {"h"}, pytest.fail)


def test_a_disk_without_room_for_a_run_is_named_and_not_the_mirror(run_folder: Path, tmp_path: Path, disk: Disk):
    assert finished(Mirror(str(tmp_path / "there"), run_folder)) == ""
    root = tmp_path / "elsewhere"
    root.mkdir()
    disk.full_after(root, 1, only_once=True)
    with pytest.raises(DiskError, match=r"cannot write .*elsewhere: No space left on device; free space there"):
        fetch(str(tmp_path / "there"), root, {"h"}, print)
    assert list(root.iterdir()) == []


def test_a_run_that_could_not_be_fetched_whole_leaves_nothing(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    finished(Mirror(str(tmp_path / "there"), run_folder))
    get = type(fsspec.filesystem("file")).get_file

    def fails(system: Any, path: str, to: str) -> None:
        if path.endswith("r1.json"):
            raise OSError(5, "Input/output error")
        get(system, path, to)

    monkeypatch.setattr(type(fsspec.filesystem("file")), "get_file", fails)
    with pytest.raises(UserError, match=r"output\.mirror = .*there: cannot be read \(Input/output error\)"):
        fetch(str(tmp_path / "there"), tmp_path / "new", {"h"}, lambda _: None)
    assert list((tmp_path / "new").iterdir()) == []


# Places that cannot be used


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("nosuch://bucket", "nosuch"), ("http://127.0.0.1:9/x", ""), ("/proc/raysim", "No such file"),
        ("{runs}", "that is output.dir itself"), ("file://{runs}", "that is output.dir itself"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_by_name(address: str, cause: str, tmp_path: Path):
    address = address.format(runs=tmp_path / "runs")
    with pytest.raises(UserError, match=rf"output\.mirror = {address}: cannot be written \(.*{cause}.*leave output"):
        check_mirror(address, str(tmp_path / "runs"))


def test_it_is_refused_before_anything_starts_and_a_word_is_no_place(small: dict[str, Any]):
    with pytest.raises(UserError, match=r"output\.mirror = nosuch://b"):
        raysim.run(small, output={"mirror": "nosuch://b"})
    assert not Path(small["output"]["dir"]).exists()
    with pytest.raises(ConfigError, match=r"output\.mirror = 'off': .* write null for no mirror"):
        raysim.run(small, output={"mirror": "off"})


def test_a_place_that_fails_later_is_a_problem_and_the_next_time_may_be_none(run_folder: Path, tmp_path: Path):
    there = tmp_path / "there"
    there.write_text("a file where the folder should be")
    mirror = Mirror(str(there), run_folder)
    mirror.update()
    while not mirror.problem:
        threading.Event().wait(0.01)
    assert mirror.problem.startswith(f"output.mirror = {there}: cannot be written (")
    there.unlink()
    assert finished(mirror) == ""
    assert tree(there / run_folder.name) == tree(run_folder)


def test_the_end_waits_for_a_slow_place_with_a_limit(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hangs = threading.Event()
    monkeypatch.setattr(type(fsspec.filesystem("file")), "put_file", lambda *_, **__: hangs.wait())
    mirror = Mirror(str(tmp_path / "there"), run_folder)
    said: list[str] = []
    mirror.finish(said.append, wait_s=0.1)
    assert said == [f"waiting up to 0.1 s for the last files to be copied to output.mirror = {tmp_path}/there"]
    assert mirror.problem.endswith(f"not every file had been copied after 0.1 s; all of them are in {run_folder}")
    hangs.set()


# Whole runs


def test_a_finished_run_is_there_and_is_found_from_a_new_machine(run: Run, small: dict[str, Any], tmp_path: Path):
    first = run(small, output={"mirror": str(tmp_path / "there")})
    assert tree(tmp_path / "there" / first.directory.name) == tree(first.directory)
    shutil.rmtree(first.directory)
    again = run(small, output={"mirror": str(tmp_path / "there")}, rounds=4, resume=True)
    assert again.directory == first.directory
    straight = run(small, rounds=4)
    assert again.summary["model_sha256"] == straight.summary["model_sha256"]
    assert tree(tmp_path / "there" / first.directory.name) == tree(first.directory)


def test_a_sweep_finds_its_finished_runs_in_the_mirror(
    warm: object, small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "s.yaml"
    small["output"]["mirror"] = str(tmp_path / "there")
    file.write_text(yaml.safe_dump({"base": {**small, "rounds": 1}, "grid": {"seed": [0, 1]}}))
    first = run_sweep(file)
    assert tree(tmp_path / "there" / first.directory.name) == tree(first.directory)
    shutil.rmtree(small["output"]["dir"])
    again = run_sweep(file)
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out
    assert again.runs.equals(first.runs)


def test_the_hash_of_a_configuration_does_not_depend_on_the_mirror(small: dict[str, Any]):
    there = {**small, "output": {**small["output"], "mirror": "s3://bucket/x"}}
    assert raysim.load_config(small).hash() == raysim.load_config(there).hash()


def test_nothing_in_either_place_is_said_of_both(small: dict[str, Any], tmp_path: Path):
    with pytest.raises(UserError, match=rf"no run of this configuration in .*runs, nor in output\.mirror = {tmp_path}"):
        raysim.run(small, output={"mirror": str(tmp_path / "there")}, resume=True)


def test_a_run_whose_machine_is_lost_goes_on_from_the_mirror_to_the_same_bits(
    run: Run, small: dict[str, Any], store: str, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the mirror has after round 2 is enough for a new output folder and a new MLflow store."""
    there, left = tmp_path / "there", tmp_path / "left"
    config = {**small, "rounds": 4, "output": {**small["output"], "mirror": f"file://{there}"}}
    config["tracking"] = {"uri": store}
    show = Display.round

    def copied(self: Display, number: int, *others: Any) -> None:
        show(self, number, *others)
        if number == 3:
            while not (kept := list(there.glob("*/checkpoints/round-000002.json"))):
                threading.Event().wait(0.01)
            shutil.copytree(kept[0].parents[2], left)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "round", copied)
        straight = run(config)
    for gone in (there, Path(config["output"]["dir"])):
        shutil.rmtree(gone)
    left.rename(there)
    config["tracking"] = {"uri": f"sqlite:///{shutil.copy(empty_store, tmp_path / 'new.db')}"}
    resumed_from_mirror(run, config, straight.summary["model_sha256"])


def resumed_from_mirror(run: Run, config: dict[str, Any], model_sha256: str) -> None:
    """Resume the only run of a mirror: it is to end with this model, and MLflow to have each of its rounds once."""
    import mlflow

    [kept] = Path(config["output"]["mirror"].removeprefix("file://")).iterdir()
    resumed = run(config, resume=True)
    assert resumed.directory.name == kept.name
    client = mlflow.MlflowClient(tracking_uri=config["tracking"]["uri"])
    history = client.get_metric_history(resumed.summary["mlflow_run_id"], "train_loss")
    assert [metric.step for metric in history] == list(range(1, config["rounds"] + 1))
    assert resumed.summary["model_sha256"] == model_sha256
    assert tree(kept) == tree(resumed.directory)


@pytest.mark.slow
def test_a_run_whose_driver_is_killed_goes_on_from_the_mirror_to_the_same_bits(
    run: Run, small: dict[str, Any], store: str, tmp_path: Path
):
    there = tmp_path / "there"
    config = {**small, "rounds": 500, "output": {**small["output"], "mirror": f"file://{there}"}}
    config["resources"] = {"workers": 1}
    config["tracking"] = {"uri": store}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "raysim", "run", "job.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for _ in process.stdout:
        if len(list(there.glob("*/checkpoints/round-*.json"))) > 1:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [kept] = there.iterdir()
    shutil.rmtree(config["output"]["dir"])
    (tmp_path / "mlflow.db").unlink()
    done = max(json.loads(path.read_text())["round"] for path in kept.glob("checkpoints/round-*.json"))
    straight = run(small, rounds=done + 2)
    resumed_from_mirror(run, config | {"rounds": done + 2}, straight.summary["model_sha256"])
