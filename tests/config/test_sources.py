"""What a configuration is read from: files that include others, names of examples, sections given as a name."""

from pathlib import Path
from typing import Any

import pytest

from raysim.commands.sweep.grid import read_sweep
from raysim.config.load import load_config
from raysim.config.yaml_io import experiments
from raysim.core.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_a_name_in_place_of_a_section_is_that_of_its_plugin():
    short = load_config({"rounds": 1, "data": "digits", "local": "fedprox"}, ["aggregation=fedoui", "local.mu=0.5"])
    long = load_config(
        {"rounds": 1, "data": {"name": "digits"}, "local": {"name": "fedprox", "mu": 0.5}}, ["aggregation.name=fedoui"]
    )
    assert short == long


def test_a_name_on_the_command_line_keeps_the_keys_that_the_new_plugin_takes_and_names_those_it_does_not():
    proximal = {"name": "fedprox", "mu": 1.0, "epochs": 3}
    config = load_config({"rounds": 1, "data": "digits", "local": proximal}, ["local=sgd"])
    assert config.local.params["epochs"] == 3
    assert config.changes == ["local.name=sgd leaves out local.mu, which 'sgd' does not take"]


def test_a_name_and_a_section_that_contradict_each_other_are_refused():
    assert "contradict" in refused({"rounds": 1, "data": "digits"}, "local=sgd", "local.name=fedprox")


def test_a_file_that_includes_another_has_its_keys_with_its_own_over_them(tmp_path: Path):
    base = "rounds: 9\ndata: digits\nlocal: {name: sgd, epochs: 2, lr: 0.3}\nserver: adam\n"
    write(tmp_path / "parts/base.yaml", base)
    write(tmp_path / "parts/more.yaml", "seed: 5\nserver: {lr: 0.7}\n")
    own = write(tmp_path / "own.yaml", "include: [parts/base.yaml, parts/more.yaml]\nrounds: 2\nlocal: {epochs: 4}\n")
    config = load_config(own, ["seed=6"])
    assert (config.rounds, config.seed) == (2, 6)
    assert (config.local.params["epochs"], config.local.params["lr"]) == (4, 0.3)
    assert (config.server.name, config.server.params["lr"]) == ("adam", 0.7)


def test_an_included_file_includes_others_seen_from_itself_and_a_new_plugin_forgets_the_old_ones_keys(tmp_path: Path):
    write(tmp_path / "a/b/first.yaml", "rounds: 1\ndata: digits\nlocal: {name: fedprox, mu: 1.0}\n")
    write(tmp_path / "a/second.yaml", "include: b/first.yaml\n")
    config = load_config(write(tmp_path / "third.yaml", "include: a/second.yaml\nlocal: sgd\n"))
    assert config.changes == ["local.name=sgd leaves out local.mu, which 'sgd' does not take"]


def test_a_file_may_include_an_example_by_its_name(tmp_path: Path):
    config = load_config(write(tmp_path / "own.yaml", "include: quickstart\nrounds: 2\n"))
    assert (config.rounds, config.allocation.name) == (2, "fedeas")
    write(tmp_path / "quickstart", "data: digits\nrounds: 5\n")
    assert load_config(tmp_path / "own.yaml").allocation.name == "none"  # a file beside it goes before


def test_a_sweeps_base_may_include_too_in_a_file_or_in_the_sweep_itself(tmp_path: Path):
    write(tmp_path / "base.yaml", "rounds: 3\ndata: digits\n")
    write(tmp_path / "more.yaml", "include: base.yaml\nclients_per_round: 0.5\n")
    for base in ("more.yaml", "{include: more.yaml}"):
        sweep = write(tmp_path / "sweep.yaml", f"base: {base}\ngrid:\n  local: [sgd, fedprox]\n")
        configs = [cell.config for cell in read_sweep(sweep).cells]
        assert [config.local.name for config in configs] == ["sgd", "fedprox"]
        assert {config.clients_per_round for config in configs} == {0.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("include: own.yaml\n", "own.yaml includes itself"),
        ("include: missing.yaml\n", "missing.yaml does not exist"),
        ("include: []\n", "include = []: must be the path of a file, or a list of them"),
        ("include: {a: b}\n", "must be the path of a file"),
    ],
)
def test_what_cannot_be_included_is_named(tmp_path: Path, text: str, said: str):
    assert said in refused(write(tmp_path / "own.yaml", text))


def test_two_files_that_include_each_other_are_refused(tmp_path: Path):
    one = write(tmp_path / "one.yaml", "include: two.yaml\n")
    write(tmp_path / "two.yaml", "include: one.yaml\n")
    assert "includes itself, by way of two.yaml" in refused(one)


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "experiments/quickstart.yaml"])
def test_an_example_is_found_by_its_name_wherever_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    assert load_config(name).resolved() == load_config(experiments() / "quickstart.yaml").resolved()


def test_a_file_of_ones_own_wins_over_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "quickstart.yaml", "rounds: 7\ndata: digits\n")
    assert load_config("quickstart.yaml").rounds == 7


def test_a_copy_in_the_experiments_of_ones_own_goes_before_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "experiments/quickstart.yaml", "rounds: 7\ndata: digits\n")
    assert load_config("quickstart").rounds == 7


def test_a_sweep_may_have_an_example_as_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    sweep = write(tmp_path / "sweep.yaml", "base: quickstart\ngrid: {seed: [0, 1]}\n")
    assert [cell.config.rounds for cell in read_sweep(sweep).cells] == [30, 30]


@pytest.mark.parametrize(
    ("name", "said"), [("fedprox", "write local.name"), ("adam", "write server.name"), ("mine", "such as local.name")]
)
def test_a_name_without_a_section_is_asked_whose_it_is(name: str, said: str):
    assert said in refused({"rounds": 1, "data": "digits", "name": name})


def test_a_bare_name_in_a_sweeps_method_is_asked_whose_it_is(tmp_path: Path):
    grid = "{method: [{name: fedprox}, {label: b, seed: 3}]}"
    sweep = write(tmp_path / "sweep.yaml", f"base: quickstart\ngrid: {grid}\n")
    with pytest.raises(ConfigError, match="name = fedprox: this is the name of what"):
        read_sweep(sweep)
