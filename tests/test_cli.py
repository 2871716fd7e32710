"""The command line answers fast, speaks plainly, and its exit codes say how it went."""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from raysim import cli
from raysim.config.registry import KINDS, available
from raysim.core.errors import ConfigError, RunError, UserError

HEAVY = ("torch", "ray", "mlflow", "diffusers", "numpy", "pandas", "matplotlib")


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["raysim", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    output = capsys.readouterr()
    return int(stopped.value.code or 0), output.out, output.err


def raysim(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raysim", *arguments], capture_output=True, text=True, timeout=120, cwd=cwd
    )


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["run", "--help"]], ids=" ".join)
def test_help_and_list_load_nothing_heavy(arguments):
    script = (
        f"import sys; sys.argv = ['raysim', *{arguments!r}]; from raysim import cli\n"
        "try: cli.main()\n"
        f"except SystemExit as stop: print('loaded', stop.code, sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "loaded 0 []"


def test_help_answers_in_under_half_a_second():
    """Median of five processes; processor time, which other work on the machine does not stretch."""

    def spent_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(5):
        before = spent_s()
        assert raysim("--help").returncode == 0
        seconds.append(spent_s() - before)
    assert statistics.median(seconds) < 0.5


def test_help_names_every_command_with_a_line_of_explanation(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    for name, command in cli.commands.commands.items():
        assert any(line.split()[0] == name and len(line.split()) > 4 for line in out.splitlines() if line.split())
        assert command.help


def test_list_shows_every_plugin_with_the_first_line_of_its_docstring(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = call(monkeypatch, capsys, "list")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    text = "".join(out.split())  # lines are wrapped, also at hyphens
    for kind in KINDS:
        assert (f"{kind}.name" if kind != "modifier" else "partition.<modifier>") in text
        for name, (_, doc) in available(kind).items():
            assert "".join([name, *doc.split()]) in text


def test_list_shows_the_keys_of_one_plugin_with_ranges_and_defaults(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "list", "allocation", "fedeas")
    assert code == 0 and out.startswith("allocation fedeas: FedEAS: fill the classes")
    assert "  allocation.beta: a number greater than 0, or auto (default 12.0). Budget factor\n" in out
    assert "  allocation.size: sqrt, linear or none (default sqrt)\n" in out
    assert "partition.rare.max_samples: a whole number" in call(monkeypatch, capsys, "list", "modifier", "rare")[1]
    code, out, _ = call(monkeypatch, capsys, "list", "partition")
    assert code == 0 and "dirichlet_client" in out and "allocation.name" not in out
    for arguments, said in ((["alocation"], "did you mean 'allocation'"), (["local", "fedprx"], "'fedprox'"),
                            (["partition", "rare"], "see `raysim list modifier rare`"),
                            (["local", "fedavg"], "see `raysim list aggregation fedavg`")):  # fmt: skip
        code, _, err = call(monkeypatch, capsys, "list", *arguments)
        assert code == 2 and said in err


def test_the_installed_command_finds_a_plugin_in_the_working_directory_and_nothing_there_hides_a_library(tmp_path):
    """A script that is installed has its own folder on the search path, where `python -m raysim` has this one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/raysim_command.py").write_text("from raysim.cli import main\nmain()\n")
    (tmp_path / "mine.py").write_text('def nothing(counts_KC):\n    """No image."""\n    return counts_KC * 0\n')
    (tmp_path / "click.py").write_text("raise RuntimeError\n")
    command = [sys.executable, "bin/raysim_command.py", "list", "allocation", "mine:nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith("allocation mine:nothing: No image."), done.stderr


@pytest.mark.parametrize("kind", ["data", "partition", "modifier", "allocation", "server", "aggregation"])
def test_list_describes_every_plugin(kind, monkeypatch, capsys):
    for name in available(kind):
        code, out, _ = call(monkeypatch, capsys, "list", kind, name)
        assert code == 0 and "something else" not in out and available(kind)[name][1] in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Usage"),
        (["runn"], "No such command 'runn'"),
        (["run"], "give a configuration"),
        (["run", "x.yaml", "--seed", "3"], "No such option '--seed'"),
    ],
    ids=["nothing", "misspelt", "no configuration", "option"],
)
def test_a_wrong_command_line_is_refused_with_code_2(monkeypatch, capsys, arguments, said):
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert code == 2 and said in out + err and "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "x.yaml", "--rounds", "5"], "keys are set without dashes: rounds=5\n"),
        (["run", "x.yaml", "--rounds=5", "seed=1"], "keys are set without dashes: rounds=5\n"),
        (["run", "x.yaml", "--rounds"], "keys are set without dashes: rounds=VALUE\n"),
        (["run", "x.yaml", "--clients-per-round", "0.5"], "clients_per_round=0.5\n"),
        (["plan", "x.yaml", "--alpha", "0.3"], "partition.alpha=0.3\n"),
        (["sweep", "x.yaml", "--learning_rate", "0.3", "seed=3"], "local.lr=0.3\n"),
        (["doctor", "--xyzzy", "3"], "xyzzy=3\n"),
        (["pretrain", "x.yaml", "--steps", "3"], "steps=3\n"),
    ],
    ids=" ".join,
)
def test_a_key_written_as_an_option_is_answered_with_how_keys_are_set(monkeypatch, capsys, arguments, said):
    code, _, err = call(monkeypatch, capsys, *arguments)
    assert code == 2 and err.endswith(said) and "No such option" in err


def test_an_option_of_a_command_that_takes_no_key_is_only_refused(monkeypatch, capsys):
    code, _, err = call(monkeypatch, capsys, "report", "--rounds", "5")
    assert code == 2 and "keys are set" not in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError(["lr = 0: must be more"], "x.yaml"), 2, "error: 1 problem in x.yaml:\n  - lr = 0: must be more\n"),
        (UserError("data.path = 'x': does not exist"), 2, "error: data.path = 'x': does not exist\n"),
        (RunError("client 3 failed in round 2: ValueError"), 1, "error: client 3 failed in round 2: ValueError\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=["configuration", "input", "run", "interrupt"],
)
def test_the_exit_code_says_what_went_wrong(monkeypatch, capsys, error, code, said):
    from raysim.lifecycle import entry

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(entry, "run", failing)
    got, out, err = call(monkeypatch, capsys, "run", "x.yaml")
    assert (got, out) == (code, "raysim: reading x.yaml\n") and said in err and "Traceback" not in err


REFUSED = {
    "unknown key": (["roudns=3"], "did you mean 'rounds'?"),
    "GPU share without a GPU": (["resources.gpus_per_worker=0.5"], "resources.gpus_per_worker = 0.5: no GPU was found"),
    "folder as a tracking store": (["tracking.uri=./mlruns"], "use sqlite:///"),
    "output below a file": (["output.dir=occupied/runs"], "output.dir"),
    "data path": (["data.name=parquet", "data.path=nowhere"], "nowhere does not exist"),
}


@pytest.mark.parametrize(("overrides", "said"), REFUSED.values(), ids=REFUSED)
def test_input_that_cannot_work_is_refused_before_ray_starts(monkeypatch, capsys, tmp_path, overrides, said):
    """In a folder of its own, which stays as it was: no run directory, no tracking store."""
    import torch

    if "gpus" in overrides[0] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "occupied").write_text("a file, not a folder")
    (tmp_path / "x.yaml").write_text("data: {name: digits}\nrounds: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, out, err = call(monkeypatch, capsys, "run", "x.yaml", *overrides)
    assert code == 2 and said in err
    assert "Traceback" not in err and "Ray" not in out and len(err.splitlines()) < 20
    assert {path.name for path in tmp_path.iterdir()} == {"occupied", "x.yaml"}


def test_a_process_that_is_given_no_configuration_names_path_and_exits_with_2(tmp_path):
    done = raysim("run", "missing.yaml", cwd=tmp_path)
    assert done.returncode == 2 and str(tmp_path / "missing.yaml") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cfg.yaml", "--resume"], ("cfg.yaml", (), True)),
        (["cfg.yaml", "--resume", "rounds=9"], ("cfg.yaml", ("rounds=9",), True)),
        (["--resume", "cfg.yaml", "rounds=9"], ("cfg.yaml", ("rounds=9",), True)),
        (["--resume", "runs/a"], ("runs/a/config.yaml", (), "runs/a")),
        (["--resume", "runs/a", "rounds=9"], ("runs/a/config.yaml", ("rounds=9",), "runs/a")),
        (["cfg.yaml", "rounds=9", "--resume", "runs/a"], ("cfg.yaml", ("rounds=9",), "runs/a")),
        (["cfg.yaml"], ("cfg.yaml", (), False)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_resume_takes_a_folder_or_none_wherever_it_stands(monkeypatch, capsys, tmp_path, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg.yaml").write_text("rounds: 1")
    (tmp_path / "runs/a").mkdir(parents=True)
    asked: list[object] = []

    def run(config: str, overrides: object, *, resume: object, accept_changes: bool) -> None:
        asked.append((config, overrides, resume))
        raise RunError("seen")

    monkeypatch.setattr("raysim.lifecycle.entry.run", run)
    assert call(monkeypatch, capsys, "run", *arguments)[0] == 1
    assert asked == [expected]


@pytest.mark.parametrize("arguments", [[], ["--resume"], ["--resume", "missing"]], ids=" ".join)
def test_a_run_without_configuration_or_folder_is_refused(monkeypatch, capsys, arguments):
    code, _, error = call(monkeypatch, capsys, "run", *arguments)
    assert code == 2 and ("give a configuration" in error or "there is no such folder" in error)


def test_a_dry_run_says_what_doctor_says_and_starts_nothing(monkeypatch, capsys):
    code, output, _ = call(monkeypatch, capsys, "run", "quickstart", "--dry-run", "rounds=2")
    assert code in (0, 2) and "1,770 synthetic images, 2 rounds" in output


@pytest.mark.parametrize(
    ("words", "offered"),
    [("run quickstart local.l", "local.lr="), ("list loc", "local"), ("list local fedp", "fedprox")],
)
def test_the_shell_completes_keys_kinds_and_names(words, offered):
    environment = {
        **os.environ, "_RAYSIM_COMPLETE": "bash_complete", "COMP_WORDS": f"raysim {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    script = "from raysim.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert f"plain,{offered}" in done.stdout.splitlines()


def test_init_copies_the_examples_once_and_spares_what_was_changed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, capsys, "init")[0] == 0
    assert call(monkeypatch, capsys, "init")[0] == 0
    mine = tmp_path / "experiments/quickstart.yaml"
    mine.write_text("rounds: 3")
    code, _, error = call(monkeypatch, capsys, "init")
    assert code == 2 and "quickstart.yaml" in error and mine.read_text() == "rounds: 3"
    assert (tmp_path / "experiments/generators/digits.yaml").is_file()


def test_output_that_cannot_be_written_and_a_working_directory_that_is_gone_are_named(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "raysim", "list"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device; free space there\n"
    script = "import os, sys; from raysim.cli import main; os.rmdir(os.getcwd()); sys.argv = ['raysim', 'list']; main()"
    (tmp_path / "gone").mkdir()
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "gone", capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: the working directory is gone; change to one that exists\n"
