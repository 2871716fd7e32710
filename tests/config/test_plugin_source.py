"""The digest of a plug-in's source covers what it imports of the user's, and nothing else."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysim.config.plugin_source import own_digest, source_digest, with_source


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that imports one beside it, one in a package, and, through that, a constant."""
    (tmp_path / "parts_of_it").mkdir()
    sources = {
        "a_plug.py": "import json\nimport numpy\nimport beside_it\nfrom parts_of_it.act import f\ndef g(): return f()",
        "beside_it.py": "x = 1",
        "unrelated_one.py": "y = 1",
        "parts_of_it/__init__.py": "",
        "parts_of_it/act.py": "from .constant import c\ndef f(): return c",
        "parts_of_it/constant.py": "c = 1",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("a_plug", "unrelated_one"):
        importlib.import_module(name)
    yield tmp_path
    mine = {"a_plug", "beside_it", "unrelated_one", "parts_of_it"}
    for name in [name for name in sys.modules if name.partition(".")[0] in mine]:
        del sys.modules[name]


@pytest.mark.parametrize("changed", ["a_plug.py", "beside_it.py", "parts_of_it/act.py", "parts_of_it/constant.py"])
def test_a_change_anywhere_in_what_it_imports_changes_the_digest(modules: Path, changed: str):
    before = source_digest("a_plug:g")
    path = modules / changed
    path.write_text(path.read_text() + "\n# edited")
    assert len(before) == 64 and source_digest("a_plug:g") != before


def test_what_it_does_not_import_does_not(modules: Path):
    before = source_digest("a_plug:g")
    (modules / "unrelated_one.py").write_text("y = 2")
    assert source_digest("a_plug:g") == before


def test_raysims_own_plugins_have_none_and_one_of_their_fingerprints_stays_as_it_is(modules: Path):
    assert source_digest("ddpm") == "" == source_digest("raysim.generation.ddpm:ddpm")
    assert with_source("ddpm", "abc") == "abc" != with_source("a_plug:g", "abc")
    assert len(own_digest()) == 64
