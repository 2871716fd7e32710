"""Whatever a user writes ends in a configuration that can be read back, or in a ConfigError: never in a traceback."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysim.config.load import load_config
from raysim.config.registry import available, parameters, resolve
from raysim.config.schema import MODIFIERS, PLUGIN_SECTIONS, SECTIONS, Config, keys
from raysim.config.yaml_io import parse_yaml
from raysim.core.errors import ConfigError, UserError
from raysim.lifecycle.prepare import prepare

LIGHT = ("data", "partition", "allocation", "local", "aggregation", "server")
BASE: dict[str, Any] = {"data": {"name": "digits"}, "rounds": 3}
HEAVY = ("generator", "model")  # importing them takes seconds
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([10**12, 2**63, -1, 10**400, "auto", "off", "none", "cosine", "fedeas", "numpy", "client", "x:y"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["of", "kind", "name", "beta", "fraction", "every", "", "x"]), inner, max_size=3),
    max_leaves=6,
)


def _plugin_keys() -> dict[str, list[tuple[str, list[str]]]]:
    """Section -> (name of a plug-in, its keys and those of the section)."""
    return {
        section: [
            (name, [*parameters(resolve(section, name)).model_fields, *SECTIONS[section].model_fields])
            for name in available(section)
        ]
        for section in LIGHT
    }


PLUGIN_KEYS = _plugin_keys()
TOP = [name for name in Config.model_fields if name not in SECTIONS]


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """Real keys, and now and then another, with any values."""
    found: dict[str, Any] = {}
    for section in draw(st.lists(st.sampled_from(LIGHT), unique=True, max_size=4)):
        name, known = draw(st.sampled_from(PLUGIN_KEYS[section]))
        chosen = draw(st.lists(st.sampled_from([*known, "lrr"]), unique=True, max_size=4))
        found[section] = {key: draw(VALUES) for key in chosen}
        if draw(st.integers(0, 9)):
            found[section]["name"] = name
    plain = [name for name in SECTIONS if name not in PLUGIN_SECTIONS]
    for section in draw(st.lists(st.sampled_from(plain), unique=True, max_size=2)):
        chosen = draw(st.lists(st.sampled_from(list(SECTIONS[section].model_fields)), unique=True, max_size=4))
        found[section] = {key: draw(VALUES) for key in chosen}
    for key in draw(st.lists(st.sampled_from([*TOP, *SECTIONS, "zzz"]), unique=True, max_size=2)):
        found[key] = draw(VALUES)
    return {**BASE, **found}


def check(source: Any, overrides: list[str] = []) -> None:  # noqa: B006 - never changed
    """A configuration can be read back, hashed and explained; anything else is a ConfigError of short lines."""
    try:
        config = load_config(source, overrides, LIGHT)
    except ConfigError as error:
        assert error.problems and all(isinstance(problem, str) and problem for problem in error.problems)
        assert all(len(problem) < 2000 for problem in error.problems)
        return
    assert all(isinstance(note, str) for note in config.notes)
    again = load_config(yaml.safe_load(yaml.safe_dump(config.resolved())), (), LIGHT)
    assert again.resolved() == config.resolved()
    found = json.loads(json.dumps(config.result_keys()))
    assert found == again.result_keys() and config.hash() == again.hash()
    assert config.chosen <= {key.name for key in keys(config.resolved())} | {f"partition.{name}" for name in MODIFIERS}


@quick
@given(sections())
def test_real_keys_with_any_values(plain):
    check(plain)


@quick
@given(st.dictionaries(st.text(max_size=5) | st.sampled_from([*TOP, *SECTIONS]), VALUES, max_size=5))
def test_any_mapping(plain):
    check(plain)


@quick
@given(
    st.lists(
        st.tuples(
            st.sampled_from([f"{s}.{k}" for s in LIGHT for _, known in PLUGIN_KEYS[s] for k in known] + TOP)
            | st.text(alphabet="ab.=-_ ", max_size=6),
            st.text(alphabet="01.:_-+eE[]{}&*!,'\"#|> \n\tabxof", max_size=12),
        ),
        max_size=4,
    )
)
def test_any_override(pairs):
    check(BASE, [f"{key}={value}" for key, value in pairs])


@quick
@given(st.text(alphabet="0179.:_-+eE[]{}&*!,'\"#|>%@`?~= \n\tabnyo<", max_size=60) | st.text(max_size=40))
def test_any_text_as_yaml(text):
    try:
        parse_yaml(text, "file")
    except ConfigError as error:
        assert len(error.problems) == 1


SMALL = {"integer": st.integers(0, 30), "number": st.floats(0, 2), "boolean": st.booleans(), "null": st.none()}


def fitting(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of about the right kind for a JSON schema: most of them are accepted."""
    if "$ref" in schema:
        return fitting(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return st.one_of([fitting(branch, root) for branch in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return st.lists(fitting(schema.get("items", {}), root), max_size=3)
    if "properties" in schema:
        return st.fixed_dictionaries({}, optional={k: fitting(v, root) for k, v in schema["properties"].items()})
    if schema.get("type") == "object":
        return st.dictionaries(st.sampled_from(["of", "beta", "total", "fraction", "rate"]), st.sampled_from(
            ["fedeas", "none", 0.2, 3]), max_size=2)
    return SMALL.get(schema.get("type", ""), st.text(max_size=3))


@pytest.mark.parametrize(
    ("section", "name"),
    [(s, n) for s in ("partition", "allocation") for n, _ in PLUGIN_KEYS[s]] + [("modifier", n) for n in MODIFIERS],
)
def test_what_is_accepted_can_be_prepared_or_is_refused(section, name):
    """From the configuration to clients and quota on 400 digits: a UserError at worst."""
    model = parameters(resolve(section, name))
    schema = model.model_json_schema()
    drawn = st.fixed_dictionaries({}, optional={k: fitting(v, schema) for k, v in schema.get("properties", {}).items()})
    data = {"name": "digits", "train_samples": 400, "test_samples": 50}

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(drawn)
    def battery(params):
        if section == "modifier":
            plain = {**BASE, "data": data, "partition": {"name": "iid", name: params}}
        else:
            plain = {**BASE, "data": data, "partition": {"name": "iid"}, section: {**params, "name": name}}
        try:
            prepared = prepare(load_config(plain, (), LIGHT))
        except UserError:
            return
        assert prepared.partition.clients >= 1 and (prepared.quota_KC >= 0).all()

    battery()
