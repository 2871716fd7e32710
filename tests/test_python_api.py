"""raysim from Python and in a notebook: light to import, warm in a session, results that print and draw themselves."""

import contextlib
import importlib.abc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import raysim
from raysim.commands.sweep.grid import read_sweep
from raysim.config.load import with_resources
from raysim.core.errors import ConfigError, RunError, UserError
from raysim.core.signals import Interrupted
from raysim.engine.session import Session
from raysim.lifecycle.build import read_config
from raysim.lifecycle.session import KeptSession

NOTEBOOK = Path(__file__).parents[1] / "experiments/tutorial.ipynb"
INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path

def interrupt():
    while len(list(Path("runs").glob("*/history"))) < 2:
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)  # as the button of a notebook does

threading.Thread(target=interrupt).start()
raysim.run(config, rounds=1_000_000)
"""


def test_every_public_name_is_there_and_none_is_imported_before_it_is_used():
    names = sorted(set(raysim.__all__) - {"__version__"})
    heavy = "{'torch', 'ray', 'mlflow', 'pandas', 'matplotlib', 'pydantic'} & set(sys.modules)"
    script = f"import sys, raysim; print({heavy}); print([n for n in {names} if not callable(getattr(raysim, n))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.splitlines() == ["set()", "[]"]


@pytest.fixture
def kept(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptSession]:
    """A session on the Ray that the tests share."""
    importlib.import_module("raysim.lifecycle.runner")  # which needs the class itself
    monkeypatch.setattr("raysim.engine.session.Session", lambda _: contextlib.nullcontext(session))
    with raysim.session(workers=1) as opened:
        yield opened


def workers_of(kept: KeptSession) -> list[object]:
    """The Ray actors of a session."""
    assert kept.ray is not None and kept.ray._pool is not None
    return [member.actor for member in kept.ray._pool.members.values()]


def test_runs_inside_a_session_use_its_ray_and_the_second_begins_at_once(
    kept: KeptSession, small: dict[str, Any], unrendered: None
):
    """What a first run pays for is there: the second one starts no Ray and no worker, and imports nothing."""
    config = {**small, "model": {"name": "linear"}, "resources": {"workers": 1}}
    raysim.run(config)
    before, workers = set(sys.modules), workers_of(kept)
    raysim.run(config, seed=1)
    assert set(sys.modules) - before == set()
    assert workers_of(kept) == workers and len(workers) == 1
    with pytest.raises(UserError, match="a session is open in this process already"):
        raysim.session().open()
    kept.close()
    assert kept.ray is None


def test_a_result_prints_five_lines_and_loads_again(kept: KeptSession, small: dict[str, Any], tmp_path: Path):
    result = raysim.run({**small, "model": {"name": "linear"}, "resources": {"workers": 1}})
    assert len(str(result).splitlines()) == 5 and f"{result.summary['final_accuracy']:.4f} after round 3" in str(result)
    again = raysim.load_result(result.directory)
    assert isinstance(again, raysim.Result) and str(again) == str(result) and again.metrics.equals(result.metrics)
    assert result.clients.groupby("round").size().tolist() == [4, 4, 4]
    assert result.plot().save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<pre>digits" in result._repr_html_() and "data:image/png;base64," in result._repr_html_()
    with pytest.raises(UserError, match="no folder of a finished run"):
        raysim.load_result(tmp_path)


def test_a_run_and_a_sweep_inside_a_session_have_the_resources_of_the_session_but_for_those_they_set(
    kept: KeptSession, small: dict[str, Any], tmp_path: Path, unrendered: None
):
    """The machine has more cores than one: without the session, `workers: auto` would be as many workers."""
    config = {**small, "model": {"name": "linear"}, "rounds": 1, "resources": {"threads_per_worker": 1}}
    raysim.run(config)
    assert len(workers_of(kept)) == 1
    plain = raysim.load_config(config)
    assert with_resources(plain, {"workers": 3, "threads_per_worker": 2}).resources.workers == 3
    assert with_resources(plain, {"workers": 3, "threads_per_worker": 2}).resources.threads_per_worker == 1
    assert read_config(plain, [], {}, resources={"workers": 3}).resources.workers == 3
    assert read_config(plain, ["resources.workers=2"], {}, resources={"workers": 3}).resources.workers == 2
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": config, "grid": {"seed": [0, 1]}}))
    cells = read_sweep(tmp_path / "sweep.yaml", resources={"workers": 3}).cells
    assert [cell.config.resources.workers for cell in cells] == [3, 3]


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("raysim.lifecycle.entry", lambda: raysim.run),
        ("raysim.lifecycle.runner", lambda: raysim.run({})),
        ("raysim.engine.session", lambda: raysim.session().open()),
        ("raysim.commands.sweep.sweep", lambda: raysim.sweep("none.yaml")),
    ],
    ids=["name", "run", "session", "sweep"],
)
def test_an_interrupt_while_a_module_is_imported_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch, module: str, call: Callable[[], object]
):
    """Ray and torch cannot be imported again in a process in which their import was cut short."""
    finished = []

    class Interrupting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, self) if name == module else None

        def exec_module(self, imported: ModuleType) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            imported.__getattr__ = lambda _: lambda *_, **__: time.sleep(60)  # type: ignore[attr-defined]
            finished.append(True)

    monkeypatch.setattr("raysim.lifecycle.entry._tracks", lambda *_: False)
    monkeypatch.setattr("raysim.commands.sweep.entry.MlflowProcess", contextlib.nullcontext)
    parent, _, name = module.rpartition(".")
    importlib.import_module(module)
    monkeypatch.setattr(sys.modules[parent], name, sys.modules[module])  # put back at the end, as is the module
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(Interrupted):
        call()
    assert finished == [True]


def test_a_session_refuses_keys_that_no_run_could_have():
    with pytest.raises(ConfigError, match=r"resources\.wrokers"):
        raysim.session(wrokers=2)


def test_the_tutorial_notebook_runs_with_one_bar_for_each_run_and_no_warning(tmp_path: Path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, 4)
    assert len(notebook.cells) == 10
    place = next(i for i, cell in enumerate(notebook.cells) if "helped = raysim.run" in cell.source)
    notebook.cells.insert(place, nbformat.v4.new_code_cell(INTERRUPTED, metadata={"tags": ["raises-exception"]}))
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    stopped = notebook.cells.pop(place).outputs
    assert [o.evalue for o in stopped if o.output_type == "error"] == ["by SIGINT"]
    assert any("to go on: --resume, or resume=True" in o.get("text", "") for o in stopped)
    (bar,) = [o.data["text/plain"] for o in stopped if o.output_type == "display_data"]
    assert "/1,000,000" in bar and "accuracy" in bar and "left" not in bar
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    bars = [o for o in outputs if o.output_type == "display_data" and "round " in o.data.get("text/plain", "")]
    assert len(bars) == 2 and all("3/3" in bar.data["text/plain"] for bar in bars)
    shown = "".join(o.text for o in outputs if o.output_type == "stream")
    assert shown.count("to start: 1 worker on CPU") == 2
    assert any("image/png" in o.get("data", {}) or "text/html" in o.get("data", {}) for o in outputs)


@pytest.mark.parametrize("error", [UserError("told"), RunError("told"), Interrupted("told")], ids=repr)
def test_a_notebook_shows_the_message_of_an_error_and_no_traceback(error: BaseException):
    """`_render_traceback_` is what IPython asks an exception for."""
    assert error._render_traceback_() == [f"{type(error).__name__}: told"]  # type: ignore[attr-defined]
