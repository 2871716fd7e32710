"""A configuration that cannot work is refused with a short message of key, value and remedy; others are read right."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from raysim.config.load import foreign_code, load_config
from raysim.config.schema import MODIFIERS, Config, keys, may_change_on_resume
from raysim.core.errors import ConfigError, UserError
from raysim.lifecycle.prepare import prepare

BASE = {"data": {"name": "digits"}, "rounds": 3}
YAML = "data: {name: digits}\nrounds: 3\n"
LIGHT = ("data", "partition", "allocation", "local", "aggregation", "server")  # sections that need no torch
BATCHING = ("auto", "on", "off")
ONE_OF_EACH = {"partition.rare.fraction": 0.5, "resources.gpus_per_worker": 1}
TWO_CLIENTS = ("partition.clients=2", "partition.alpha=100")


def problems(source, overrides=(), sections=LIGHT) -> list[str]:
    """The problems that a configuration is refused with, each short and free of validator jargon."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, sections)
    text = str(caught.value)
    assert len(text.splitlines()) <= 20, "one screen"
    for jargon in ("Input should", "valid integer", "pydantic", "type=", "Traceback", "None"):
        assert jargon not in text
    return caught.value.problems


def written(folder: Path, text: str) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_minimal_configuration_fills_in_every_other_key():
    config = load_config(BASE)
    resolved = config.resolved()
    assert resolved["partition"] == {
        "name": "dirichlet", "clients": 10, "alpha": 0.1, "min_samples": 1,
        "stream": "raysim", "seed": None, "rare": None, "label_noise": None, "input_noise": None,
    }
    assert set(resolved) == set(Config.model_fields)
    assert json.loads(json.dumps(resolved)) == resolved
    assert load_config(resolved).hash() == config.hash()


def test_a_missing_file_is_named_with_its_absolute_path_and_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text(YAML)
    [problem] = problems("quickstrat.yaml")
    assert f"{tmp_path / 'quickstrat.yaml'} does not exist on {socket.gethostname()}" in problem
    assert "did you mean 'quickstart.yaml'?" in problem
    [problem] = problems(tmp_path)
    assert f"{tmp_path} is a folder" in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- data\n- rounds\n", "the file holds a list"),
        ("hello\n", "the file holds just hello"),
        ("seed: 1\n\trounds: 3\n", "line 2, column 1: not valid YAML"),
        ("data: {name: digits\nrounds: 3\n", "line 2"),
        ("rounds: 2024-13-45\n", "put the value in quotes"),
        ("seed: 1\nrounds: 3\nseed: 2\n", "line 3: the key 'seed' stands twice"),
        ("local: {lr: 0.1, lr: 0.2}\n", "line 1: the key 'lr' stands twice"),
        ("local:\n  lr: 0.1\n  momentum: 0\n  lr: 0.2\n", "line 4: the key 'lr' stands twice"),
        ("on: 3\n", "line 1: the key 'on' is not text to YAML; put it in quotes"),
        ("1: 3\n", "the key '1' is not text"),
        ("rounds: 1\n---\nrounds: 2\n", "a file holds one configuration; remove the line `---`"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_the_line(tmp_path, text, said):
    [problem] = problems(written(tmp_path, text))
    assert said in problem


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00\x80")
    [problem] = problems(tmp_path / "weights.bin")
    assert "not a text file" in problem


def test_what_is_no_path_and_overrides_in_one_text_are_refused():
    with pytest.raises(ConfigError, match=r"None is no configuration; give the path of a YAML file, or a mapping"):
        load_config(None)  # type: ignore[arg-type]
    assert problems(BASE, "seed=3") == ["overrides = 'seed=3': must be a list of texts, such as ['seed=3']"]


def test_yaml_merge_keys_are_not_taken_for_duplicates(tmp_path):
    text = YAML + "local: &base {name: sgd, lr: 0.1, epochs: 2}\n"
    config = load_config(written(tmp_path, text + "server: {<<: {name: sgd, lr: 0.5}, lr: 0.25}\n"), (), LIGHT)
    assert config.server.params["lr"] == 0.25


@pytest.mark.parametrize(
    ("spelling", "value"), [("1e-3", 1e-3), ("1E-3", 1e-3), ("1.e-3", 1e-3), (".5e-2", 5e-3), ("+1e-2", 1e-2), ("2", 2)]
)
def test_exponents_without_a_point_are_numbers(tmp_path, spelling, value):
    config = load_config(written(tmp_path, YAML + f"local: {{lr: {spelling}}}\n"), [f"server.lr={spelling}"], LIGHT)
    assert config.local.params["lr"] == config.server.params["lr"] == value


def test_exponents_without_a_point_are_numbers_inside_lists(tmp_path):
    """Class counts must be whole, so 1e1 is refused as the number 10.0, not as text."""
    path = written(tmp_path, "data: {name: labels, counts: [1e1, 20]}\nrounds: 3\n")
    assert problems(path)[0].startswith("data.counts = [10.0, 20]: must be a list, each entry a whole number")


@pytest.mark.parametrize(
    ("override", "wrong", "hint"),
    [
        ("roudns=3", "roudns = 3", "'rounds'"),
        ("partition.aplha=0.1", "partition.aplha = 0.1", "'alpha'"),
        ("local.learning_rate=0.1", "local.learning_rate = 0.1", "'lr'"),
        ("resources.num_workers=2", "resources.num_workers = 2", "'workers'"),
        ("partition.rare.fracton=0.1", "partition.rare.fracton = 0.1", "'fraction'"),
        ("partition.rares.fraction=0.1", "partition.rares = {fraction: 0.1}", "'rare'"),
        ("alpha=0.3", "alpha = 0.3", "'partition.alpha'"),
        ("lr=0.3", "lr = 0.3", "'local.lr'"),
        ("num_workers=3", "num_workers = 3", "'resources.workers'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path, override, wrong, hint):
    """The same key is refused on the command line, in a mapping and in a file."""
    nested: dict = {}
    key, _, value = override.partition("=")
    node = nested
    for step in key.split(".")[:-1]:
        node = node.setdefault(step, {})
    node[key.split(".")[-1]] = float(value) if "." in value else int(value)
    for source, overrides in [
        (BASE, [override]), ({**BASE, **nested}, []), (written(tmp_path, json.dumps({**BASE, **nested})), [])
    ]:
        [problem] = problems(source, overrides)
        assert problem.startswith(f"{wrong}: no such key; did you mean {hint}? (valid keys here: ")


def test_an_unknown_key_that_resembles_nothing_lists_the_valid_ones():
    [problem] = problems(BASE, ["allocation.zzz=1"])
    assert problem == "allocation.zzz = 1: no such key; valid keys here: at, name, total"


def test_keys_within_keys_are_checked_too():
    [problem] = problems(BASE, ["local.schedule.kindd=step"])
    assert problem.startswith("local.schedule.kindd = step: no such key; did you mean 'kind'? (valid keys here: ")
    assert "name" not in problem
    [problem] = problems(BASE, ["local.schedule.kind=stepp"])
    assert problem.startswith("local.schedule.kind = stepp: must be ")
    [problem] = problems(BASE, ["local.schedule=step"])
    assert problem.startswith("local.schedule = step: must be `key: value` pairs with the keys kind, ")


def test_missing_required_keys_are_named_with_what_they_hold():
    assert problems({}) == [
        "rounds is missing: it must be a whole number of at least 1. Federated rounds.",
        "data is missing: it must be a plug-in and its keys, such as {name: NAME, key: value}. Images and labels.",
    ]
    [problem] = problems({"rounds": 3, "data": {}})
    assert problem.startswith("data.name is missing: it must be text. Name of the plug-in")
    assert problems({"rounds": 3, "data": {"name": "parquet"}}) == ["data.path is missing: it must be text."]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds=three", "rounds = three: must be a whole number of at least 1"),
        ("rounds=", "rounds = null: must be a whole number of at least 1"),
        ("rounds=true", "rounds = true: must be a whole number of at least 1"),
        ("seed=1e3", "seed = 1000.0: must be a whole number of at least 0; write 1000"),
        ("seed=1.5", "seed = 1.5: must be a whole number of at least 0"),
        ("local.lr=[0.1]", "local.lr = [0.1]: must be a number greater than 0"),
        ("local.nesterov=3", "local.nesterov = 3: must be true or false"),
        ("local=null", "local = null: must be a plug-in and its keys, such as {name: NAME, key: value}"),
        ("local=3", "local = 3: must be a plug-in and its keys, such as {name: NAME, key: value}"),
        ("data.augment=crop", "data.augment = crop: must be a list, each entry crop or flip"),
        ("partition.rare=5", "partition.rare = 5: must be `key: value` pairs, or null"),
        ("resources.workers=many", "resources.workers = many: must be auto, or a whole number of at least 1"),
        ("resources.precision=fp16", "resources.precision = fp16: must be float32 or bf16"),
        ("aggregation.weight_by=all", "aggregation.weight_by = all: must be real or total"),
        ("clients_per_round=1.5",
         "clients_per_round = 1.5: must be a whole number of at least 1, or a number greater than 0 and at most 1"),
        ("tracking.experiment=5",
         "tracking.experiment = 5: must be text; put it in quotes (on the command line: '\"5\"')"),
        ("resources.object_store_bytes=5",
         "resources.object_store_bytes = 5: must be a whole number of at least 80,000,000, or null"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_with_what_is_accepted(override, message):
    assert problems(BASE, [override]) == [message]


@pytest.mark.parametrize("alpha", ["0", "-0.1", "0.1x", "[0.1, 0.2]", "null", ".nan", ".inf", "-.inf"])
def test_nonsense_concentrations_are_refused_with_the_accepted_range(alpha):
    """Five clients; a list of concentrations has no meaning here, whatever its length."""
    number = "a finite number" if alpha in (".nan", ".inf", "-.inf") else "a number"
    message = f"partition.alpha = {alpha}: must be {number} greater than 0"
    assert problems(BASE, ["partition.clients=5", f"partition.alpha={alpha}"]) == [message]


def test_zero_shards_are_refused():
    message = "partition.shards_per_client = 0: must be a whole number of at least 1"
    assert problems(BASE, ["partition.name=shards", "partition.shards_per_client=0"]) == [message]


def test_all_numbers_out_of_range_are_refused_in_one_message():
    found = problems(
        BASE,
        [
            "local.batch_size=0", "rounds=0", "local.lr=-1", "clients_per_round=1.5", "partition.label_noise.rate=2",
            "partition.input_noise.std=-1", "server.name=adam", "server.tau=0", "local.epochs=0", "partition.alpha=0",
        ],
    )  # fmt: skip
    assert {problem.split(" = ")[0] for problem in found} == {
        "local.batch_size", "rounds", "local.lr", "clients_per_round", "partition.label_noise.rate",
        "partition.input_noise.std", "server.tau", "local.epochs", "partition.alpha",
    }  # fmt: skip
    assert all(": must be a" in problem for problem in found)


def test_problems_of_all_kinds_come_together():
    found = problems({"roundz": 1, "data": {"name": "digitz"}, "local": {"lr": "fast", "mu": 1}})
    assert [problem.split(" ")[0] for problem in found] == ["data.name", "local.lr", "local.mu", "rounds", "roundz"]


def test_more_clients_per_round_than_clients_are_refused():
    [problem] = problems(BASE, ["partition.clients=5", "clients_per_round=10"])
    assert problem.startswith("clients_per_round = 10: there are only 5 clients (partition.clients); use at most 5")
    assert load_config(BASE, ["partition.clients=5", "clients_per_round=5"], LIGHT).clients_per_round == 5


def test_whole_numbers_of_clients_and_fractions_are_told_apart():
    """1 is one client, 1.0 is all of them."""
    one, all_ = (load_config(BASE, [f"clients_per_round={text}"], LIGHT).clients_per_round for text in ("1", "1.0"))
    assert (type(one), type(all_)) == (int, float)


def test_overrides_that_are_not_key_value_are_refused_together():
    found = problems(BASE, ["rounds", "=5", "a..b=1", "seed=1", "seed=2", "data.path=@x"])
    form = "is not of the form key=value, as in allocation.beta=8"
    assert found[:4] == [
        f"override 'rounds' {form}", f"override '=5' {form}", f"override 'a..b=1' {form}",
        "override 'seed=2': seed is set twice; remove one",
    ]  # fmt: skip
    assert "data.path=@x" in found[4] and "quotes" in found[4] and len(found) == 5


def test_an_override_of_a_section_that_the_file_lacks_uses_the_default_plugin():
    config = load_config(BASE, ["partition.alpha=0.5", "local.lr=1e-2"], LIGHT)
    assert (config.partition.name, config.partition.params["alpha"]) == ("dirichlet", 0.5)
    assert (config.local.name, config.local.params["lr"]) == ("sgd", 0.01)


def test_a_changed_name_leaves_out_the_keys_of_the_old_plugin_and_says_so():
    source = {**BASE, "allocation": {"name": "fedeas", "beta": 8}}
    config = load_config(source, ["allocation.name=none"], LIGHT)
    assert config.allocation.params == {"total": None}
    assert config.notes == ["allocation.name=none leaves out allocation.beta, which 'none' does not take"]
    assert problems(source, ["allocation.name=none", "allocation.beta=3"])[0].startswith("allocation.beta = 3: no such")


NOISE = "update.noise_multiplier=1.0"


@pytest.mark.parametrize("overrides", [[NOISE, "update={clip: 1.0}"], ["update={clip: 1.0}", NOISE]], ids=str)
def test_a_mapping_for_a_section_keeps_what_else_is_set_in_it(overrides):
    config = load_config(BASE, overrides, LIGHT)
    assert (config.update.clip, config.update.noise_multiplier) == (1.0, 1.0)
    assert load_config(BASE, [NOISE], LIGHT, changes={"update": {"clip": 1.0}}).hash() == config.hash()


def test_a_mapping_for_a_section_keeps_the_other_keys_of_the_file():
    source = {**BASE, "partition": {"name": "dirichlet", "clients": 4, "min_samples": 3}, "local": {"epochs": 2}}
    config = load_config(source, ["partition={alpha: 1.0}"], LIGHT, changes={"local": {"lr": 0.5}})
    assert {key: config.partition.params[key] for key in ("clients", "alpha", "min_samples")} == {
        "clients": 4, "alpha": 1.0, "min_samples": 3,
    }
    assert (config.local.params["epochs"], config.local.params["lr"]) == (2, 0.5)


@pytest.mark.parametrize("overrides", [["local.name=fedprox", "local={epochs: 3}"], ["local={epochs: 3}"]], ids=str)
def test_a_mapping_for_a_section_keeps_the_plugin_that_is_named(overrides):
    config = load_config({**BASE, "local": {"name": "fedprox", "mu": 0.5}}, overrides, LIGHT)
    assert (config.local.name, config.local.params["mu"], config.local.params["epochs"]) == ("fedprox", 0.5, 3)


def test_a_mapping_with_another_name_leaves_out_the_keys_of_the_old_plugin_and_says_so():
    source = {**BASE, "allocation": {"name": "fedeas", "beta": 8}}
    config = load_config(source, ["allocation={name: uniform, total: 20}"], LIGHT)
    assert config.allocation.params == {"total": 20}
    assert config.notes == ["allocation.name=uniform leaves out allocation.beta, which 'uniform' does not take"]


def test_a_mapping_inside_a_section_is_a_new_value_and_may_be_completed_in_any_order():
    source = {**BASE, "partition": {"label_noise": {"fraction": 0.1, "rate": 0.1, "kind": "pair"}}}
    whole, part = "partition.label_noise={fraction: 0.5, rate: 0.2}", "partition.label_noise.kind=symmetric"
    noise = {"fraction": 0.5, "rate": 0.2, "kind": "symmetric"}
    for overrides in ([whole, part], [part, whole]):
        assert load_config(source, overrides, LIGHT).resolved()["partition"]["label_noise"] == noise


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["update={clip: 1.0}", "update.clip=2.0"], "update.clip = 1.0 and update.clip = 2.0 contradict"),
        (["local.lr=0.1", "local=3"], "local = 3 and local.lr = 0.1 contradict each other; remove one"),
        (["allocation.total.of=full", "allocation.total=9"], "allocation.total = 9 and allocation.total.of = full"),
        (["allocation.total={of: fedeas, beta: 3}", "allocation.total.beta=4"], "allocation.total.beta = 4 contradict"),
        (["update={}"], "update = {}: names no key"),
    ],
)
def test_a_key_set_twice_to_different_values_is_refused(overrides, problem):
    for order in (overrides, overrides[::-1]):
        assert any(problem in found or "update.clip = 2.0 and update.clip = 1.0" in found
                   for found in problems(BASE, order))


def test_a_key_set_twice_to_one_value_is_accepted():
    assert load_config(BASE, ["update={clip: 1.0}", "update.clip=1.0"], LIGHT).update.clip == 1.0


@pytest.mark.parametrize("text", ["none", "NONE", "'no'"])
def test_a_cache_called_none_is_refused_because_a_text_names_a_folder(text):
    assert "write null for no cache" in problems(BASE, [f"output.cache={text}"])[0]
    assert load_config(BASE, ["output.cache=null"], LIGHT).output.cache is None
    assert load_config(BASE, ["output.cache=./none"], LIGHT).output.cache == "./none"


def test_the_default_plugin_in_a_configuration_written_in_full_is_no_choice():
    """`generator.name` has no default of its own; written by itself it is a choice, in a full section it is not."""
    full = load_config(load_config(BASE).resolved())
    assert "generator.name" not in full.chosen and "data.name" in full.chosen
    assert "generator.name" in load_config(BASE, ["generator.name=ddpm"]).chosen
    assert "generator.name" in load_config({**full.resolved(), "generator": {"name": "oracle"}}).chosen


def test_mappings_from_python_may_hold_paths_tuples_and_numpy_numbers():
    data = {"name": "digits", "augment": ()}
    source = {"data": data, "rounds": 3, "seed": np.int64(7), "output": {"dir": Path("x/y")}}
    config = load_config(source, (), LIGHT)
    assert (config.seed, config.output.dir, config.data.augment) == (7, "x/y", [])
    assert source["seed"] == np.int64(7), "the caller's mapping stays as it is"
    assert "cannot be kept" in problems({**BASE, "seed": object()})[0]


def test_the_hash_covers_what_is_computed_and_not_where():
    reference = load_config(BASE, (), LIGHT).hash()
    same = ["rounds=9", "tracking.uri=none", "output.dir=elsewhere", "resources.workers=1", "resources.max_retries=0"]
    same.append("resources.client_batching=off")
    other = ["seed=1", "local.lr=0.01", "resources.precision=bf16", "resources.threads_per_worker=2"]
    same += ["resources.gpus_per_worker=0", "partition.seed=0", "model.seed=0"]
    other += ["resources.on_client_failure=drop", "partition.seed=1", "model.seed=1", "resources.gpus_per_worker=0.5"]
    assert {load_config(BASE, [o], LIGHT).hash() for o in same} == {reference}
    assert len({load_config(BASE, [o], LIGHT).hash() for o in other} | {reference}) == 1 + len(other)


def test_client_batching_is_part_of_the_hash_where_it_changes_bits():
    """On a GPU, not on a CPU; on a cluster that is yet to be joined nobody knows."""
    def hashes(*overrides: str) -> int:
        return len({load_config(BASE, [*overrides, f"resources.client_batching={b}"], LIGHT).hash() for b in BATCHING})

    assert hashes("resources.gpus_per_worker=0") == 1
    assert hashes("resources.gpus_per_worker=1") == hashes("resources.address=auto") == 3
    equal = [load_config(BASE, [f"resources.gpus_per_worker={share}"], LIGHT).hash() for share in (0.25, 1, 2)]
    assert len(set(equal)) == 1, "how many workers share a GPU changes no bit"


def test_what_a_resumed_run_may_change_and_what_it_is_known_by_are_all_keys_and_overlap_in_none():
    config = load_config(BASE, [f"{key}={value}" for key, value in ONE_OF_EACH.items()], LIGHT)
    free = may_change_on_resume()
    everything = {key.name for key in keys(config.resolved())} | {f"partition.{name}" for name in MODIFIERS}
    inside = tuple(f"partition.{name}." for name in MODIFIERS)
    known = set(config.result_keys())
    assert known == {
        name for name in everything
        if not any(name == f or name.startswith(f"{f}.") for f in free) and not name.startswith(inside)
    }
    assert {"rounds", "tracking", "output", "resources.workers", "resources.address"} <= set(free)
    assert not {"resources.precision", "resources.on_client_failure", "resources.threads_per_worker"} & set(free)


def test_a_limit_without_end_is_refused():
    message = "resources.task_timeout_s = .inf: must be a finite number greater than 0"
    assert problems(BASE, ["resources.task_timeout_s=.inf"]) == [message]


EXPERIMENTS = [  # without the sweeps, which are grids over one of these
    path
    for pattern in ("*.yaml", "speed/*.yaml")
    for path in sorted((Path(__file__).parents[2] / "experiments").glob(pattern))
    if "grid" not in yaml.safe_load(path.read_text(encoding="utf-8"))
]  # fmt: skip


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_that_is_shipped_is_a_valid_configuration(path):
    config = load_config(path)
    assert load_config(config.resolved()).hash() == config.hash()


def _refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare(load_config(BASE, [*TWO_CLIENTS, *overrides], LIGHT))
    return str(caught.value)


def test_data_that_cannot_work_is_refused_with_its_path(tmp_path):
    """A path that does not exist, a label column with floats, an image that cannot be read."""
    import io

    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(buffer, "PNG")
    images, labels = [buffer.getvalue()] * 20, [i % 2 for i in range(20)]

    def table(name: str, images: list[bytes], labels: list) -> str:
        parquet.write_table(pyarrow.table({"image": images, "label": labels}), tmp_path / name)
        return str(tmp_path / name)

    missing, floats = str(tmp_path / "nowhere"), table("floats.parquet", images, [float(x) for x in labels])
    broken = table("broken.parquet", [*images[:7], b"not an image", *images[8:]], labels)
    text = _refusal("data.name=parquet", f"data.path={missing}")
    assert "data.path" in text and missing in text and "does not exist" in text
    text = _refusal("data.name=parquet", f"data.path={floats}")
    assert floats in text and "'label' holds double" in text and "whole numbers" in text
    text = _refusal("data.name=parquet", f"data.path={broken}")
    assert f"{broken}: row 7" in text and "cannot be read" in text and "replace or remove it" in text
    good = table("good.parquet", images, labels)
    config = load_config(BASE, [*TWO_CLIENTS, "data.name=parquet", f"data.path={good}"], LIGHT)
    assert prepare(config).partition.clients == 2


def test_bad_input_is_refused_without_torch_or_ray():
    """In a fresh process: a configuration and data that cannot work load neither."""
    script = f"""
import sys
from raysim.config.load import foreign_code, load_config
from raysim.core.errors import UserError
from raysim.lifecycle.prepare import prepare
refused = 0
for overrides in ["rounds=0", "alpha=1"], ["allocation.name=fedes"], ["data.name=parquet", "data.path=/nowhere"]:
    try:
        prepare(load_config({BASE!r}, overrides, {LIGHT!r}))
    except UserError:
        refused += 1
print(refused, sorted({{"ray", "torch", "mlflow", "diffusers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == ["3", "[]\n"]


def test_the_page_on_configurations_shows_every_key_with_its_default():
    """Its YAML block, read back, is the configuration that the two required keys alone give."""
    page = (Path(__file__).parents[2] / "docs/how-to/configuration.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert load_config(shown).resolved() == shown == load_config({"data": {"name": "digits"}, "rounds": 30}).resolved()


@pytest.mark.parametrize("meant", ["on", "off"])
@pytest.mark.parametrize("quote", ["", "'"])
def test_client_batching_is_on_or_off_however_yaml_reads_it(meant: str, quote: str):
    """To YAML, on and off without quotes are truth values."""
    given = f"resources.client_batching={quote}{meant}{quote}"
    assert load_config(BASE, [given], LIGHT).resources.client_batching == meant
    (problem,) = problems(BASE, ["resources.client_batching=1"])
    assert problem.startswith("resources.client_batching = 1: must be auto, ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("aggregation.name=fedprox", "fedprox is a local algorithm; write local.name=fedprox (known here: fedalign"),
        ("local.name=fedoui", "fedoui is an aggregation rule; write aggregation.name=fedoui"),
        ("local.name=fedeas", "fedeas is an allocation policy; write allocation.name=fedeas"),
        ("partition.name=rare", "rare is a modifier of the partition; write partition.rare={...}"),
        ("server.name=cnn", "cnn is a network; write model.name=cnn"),
        ("data.name=oracle", "oracle is a generator; write generator.name=oracle"),
    ],
)
def test_a_plugin_of_another_kind_is_told_where_it_belongs(override, said):
    [problem] = problems(BASE, [override])
    assert problem.startswith(override.replace("=", " = ") + ": " + said)
    [problem] = problems(BASE, [override], ())
    assert said in problem, "also where only the names are checked"


def clashing(counts_KC, *, total: int = 0, name: str = "x"):
    """A policy of the user's own with a key that the section has."""


def test_a_plugin_whose_key_is_one_of_its_section_is_refused():
    [problem] = problems(BASE, [f"allocation.name={__name__}:clashing"])
    assert "its key 'name' is one that `allocation` has for every plug-in" in problem
    assert "give the parameter another name" in problem


@pytest.mark.parametrize("name", ["a\nb", "x" * 251, " ", "bell\x07"])
def test_an_experiment_that_no_store_could_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"tracking\.experiment = .*: give a name of 1 to 250 characters"):
        load_config({"data": {"name": "digits"}, "rounds": 1, "tracking": {"experiment": name}})


def test_code_that_a_file_names_is_told_before_it_is_imported(tmp_path, monkeypatch):
    """Not that of an override, which the user has typed, nor that of a mapping, which a program gives."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs.py").write_text("from raysim.models.architectures import cnn as net\n")
    file = tmp_path / "job.yaml"
    file.write_text("data: {name: digits}\nrounds: 1\nmodel: {name: 'theirs:net'}\n")
    told: list[tuple[str, bool]] = []
    load_config(file, say=lambda text: told.append((text, "theirs" in sys.modules)))
    said = f"note: {file} names code of its own, which runs with your rights: model.name = theirs:net"
    assert told == [(said, False)]
    load_config(file, ["model.name=cnn"], say=told.append)
    load_config({"data": {"name": "digits"}, "rounds": 1, "model": {"name": "theirs:net"}}, say=told.append)
    assert len(told) == 1


def test_code_that_another_policys_total_names_is_told_however_deep():
    inner = {"of": "theirs:c"}
    plain = {"allocation": {"name": "uniform", "total": {"of": "theirs:b", "total": inner}}, "local": {"name": "a:b"}}
    assert foreign_code(plain) == [
        "local.name = a:b", "allocation.total.of = theirs:b", "allocation.total.total.of = theirs:c"
    ]
    assert foreign_code(plain, ["allocation.total=5"]) == ["local.name = a:b"]
    assert foreign_code({"allocation": {"name": "uniform", "total": 5}}) == []
