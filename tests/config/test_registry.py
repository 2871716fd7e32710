"""Plug-ins are found by name or by module:attribute, checked by their own signatures, and listed without imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.config.load import load_config
from raysim.config.registry import KINDS, available, check_name, check_parameters, parameters, resolve
from raysim.core.errors import ConfigError
from raysim.core.validation import nearest, show

BASE = {"data": {"name": "digits"}, "rounds": 3}
LIGHT = ("data", "partition", "allocation", "local", "aggregation", "server")
EVERY = [(kind, name) for kind in KINDS for name in available(kind)]

MINE = '''
from typing import Annotated
import numpy as np
from pydantic import Field
from raysim.local.sgd import sgd

def every_cell(counts_KC, *, images: Annotated[int, Field(ge=0)] = 10):
    """The same number for every client and class."""
    return np.full_like(counts_KC, images)

class slow(sgd):
    """Ten times slower."""
    def learning_rate(self, round_):
        return super().learning_rate(round_) / 10

number = 3
def no_positional(*, images: int = 1): ...
class Thing: ...
def odd(counts_KC, *, thing: Thing | None = None): ...
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's own, in a folder that Python finds."""
    (tmp_path / "my_plugins.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("import a_package_that_is_not_installed\n")
    (tmp_path / "my_typo.py").write_text("def (\n")
    (tmp_path / "my_exit.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "my_stop.py").write_text("class Stop(BaseException): ...\nraise Stop('here')\n")
    (tmp_path / "my_getter.py").write_text("def __getattr__(name):\n    raise RuntimeError(name)\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("1 / 0\n")
    (tmp_path / "my_package" / "inner.py").touch()
    (tmp_path / "my_late.py").write_text(
        "from __future__ import annotations\ndef late(counts_KC, *, images: Missing = 1): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind}:{name}" for kind, name in EVERY])
def test_every_plugin_resolves_and_its_keys_have_valid_defaults(kind, name):
    """The listed docstring is the imported one, and the defaults of a plug-in pass its own checks."""
    plugin = resolve(kind, name)
    assert plugin.__name__ == name
    first_line = available(kind)[name][1]
    assert first_line == (plugin.__doc__ or "").strip().split("\n")[0] and first_line.endswith(".")
    model = parameters(plugin)
    required = {key: None for key, field in model.model_fields.items() if field.is_required()}
    defaults = {key: field.default for key, field in model.model_fields.items() if key not in required}
    checked, problems = check_parameters(plugin, defaults, kind)
    assert [p.split(" ")[0] for p in problems] == [f"{kind}.{key}" for key in required]
    if not required:
        assert checked == defaults


@pytest.mark.parametrize("kind", KINDS)
def test_listing_reads_names_without_importing_them(kind):
    """What is listed is what the modules export: every public plug-in is in some `__all__`, and none twice."""
    found = available(kind)
    assert found
    for name, (module, doc) in found.items():
        source = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
        assert name in source.read_text() and ast.parse(source.read_text())
        assert doc


def test_listing_loads_no_plugin_module():
    script = (
        "import sys; from raysim.config.registry import KINDS, available; [available(k) for k in KINDS];"
        "print([m for m in sys.modules if m.startswith(('raysim.data', 'raysim.models', 'raysim.local', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_an_unknown_name_fails_with_the_known_ones_and_the_nearest():
    problem = check_name("allocation", "fedes")
    assert problem is not None
    assert problem.startswith("no such name; did you mean 'fedeas'? known: fbl, fedeas, full, gap,")
    assert problem.endswith("or package.module:attribute")
    assert "did you mean" not in str(check_name("model", "transformer"))
    with pytest.raises(LookupError, match="did you mean 'fedeas'"):
        resolve("allocation", "fedes")
    with pytest.raises(ConfigError, match=r"allocation\.name = fedes: no such name; did you mean 'fedeas'\?"):
        load_config(BASE, ["allocation.name=fedes"], LIGHT)


def test_a_name_is_known_only_in_its_own_kind():
    assert check_name("local", "fedprox") is None
    assert check_name("server", "fedprox") is not None


def test_a_plugin_of_the_users_own_has_its_keys_checked_like_any_other(mine):
    config = load_config(BASE, ["allocation.name=my_plugins:every_cell", "local.name=my_plugins:slow"], LIGHT)
    assert config.allocation.params == {"images": 10}
    assert config.local.params["batch_size"] == 32
    assert resolve("local", "my_plugins:slow")(lr=0.5).learning_rate(1) == 0.05
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, ["allocation.name=my_plugins:every_cell", "allocation.image=3", "local.lr=-1"], LIGHT)
    assert caught.value.problems[0] == (
        "allocation.image = 3: no such key; did you mean 'images'? (valid keys here: at, images, name)"
    )
    with pytest.raises(ConfigError, match=r"allocation\.images = -1: must be a whole number of at least 0"):
        load_config(BASE, ["allocation.name=my_plugins:every_cell", "allocation.images=-1"], LIGHT)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("local.name=not_there:algorithm", "module 'not_there' cannot be found; is it installed, in this folder or on"),
        ("local.name=not.there:algorithm", "module 'not.there' cannot be found"),
        ("local.name=my_plugins:missing", "module 'my_plugins': no attribute 'missing'"),
        ("local.name=my_plugins:number", "'number' is not a function or class"),
        ("local.name=my_broken:x", "module 'my_broken' cannot be imported: No module named"),
        ("local.name=my_typo:x", "module 'my_typo' cannot be imported: invalid syntax"),
        ("local.name=my_exit:x", "module 'my_exit' cannot be imported: SystemExit: 0 ("),
        ("local.name=my_stop:x", "module 'my_stop' cannot be imported: Stop: here ("),
        ("local.name=my_getter:x", "module 'my_getter' cannot be imported: RuntimeError: x ("),
        ("local.name=my_package.inner:x", "my_package/__init__.py:1)"),
        ("local.name=my_plugins:every_cell", "'every_cell' in module 'my_plugins' is no local plug-in: it has no "),
        ("allocation.name=my_plugins:no_positional", "is no allocation plug-in: it must take (counts_KC), and"),
        ("allocation.name=my_plugins:odd", "the annotations of 'odd' cannot be used for keys"),
        ("allocation.name=my_late:late", "name 'Missing' is not defined"),
    ],
)
def test_a_plugin_of_the_users_own_that_cannot_work_is_refused_with_the_reason(mine, override, said):
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [override], LIGHT)
    [problem] = caught.value.problems
    assert problem.startswith(override.replace("=", " = ", 1) + ": ") and said in problem


@pytest.mark.parametrize(
    ("word", "candidates", "hint"),
    [
        ("aplha", ["alpha", "clients"], "; did you mean 'alpha'?"),
        ("LR", ["lr", "epochs"], "; did you mean 'lr'?"),
        ("learning_rate", ["lr_decay", "lr"], "; did you mean 'lr'?"),
        ("learning_rate", ["rounds"], ""),
        ("alpha", ["rounds", "partition.alpha"], "; did you mean 'partition.alpha'?"),
        ("lr", ["local.lr", "server.lr"], "; did you mean 'local.lr'?"),
        ("zzz", ["alpha"], ""),
    ],
)
def test_the_nearest_name_is_the_one_a_person_would_guess(word, candidates, hint):
    assert nearest(word, candidates) == hint


def test_values_are_shown_as_yaml_on_one_short_line():
    shown = {show(value) for value in (None, True, 0.5, "a", "5", [1, None], {"a": float("inf")})}
    assert shown == {"null", "true", "0.5", "a", "'5'", "[1, null]", "{a: .inf}"}
    assert len(show(list(range(1000)))) == 80 and show("two\nlines").count("\n") == 0
