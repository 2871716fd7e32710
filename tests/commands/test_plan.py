"""The planner shows what a policy costs and removes, from counts alone, fast, and as it then happens."""

import json
import math
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raysim import cli
from raysim.allocation import fedeas_budget
from raysim.allocation.schedule import AllocationSchedule
from raysim.commands.plan.as_json import as_json, statistics
from raysim.commands.plan.plan import choose_beta, draw, parse_seeds, plan
from raysim.commands.plan.speed import Speed, measure
from raysim.commands.plan.table import print_plan, size
from raysim.commands.plan.training import TrainingSpeed
from raysim.config.load import load_config
from raysim.core.errors import ConfigError, UserError
from raysim.data.partitions import dirichlet
from raysim.lifecycle.prepare import load_dataset, prepare

COUNTS = Path(__file__).parents[2] / "experiments" / "cifar10_counts.yaml"
SMALL = {
    "rounds": 1,
    "data": {"name": "labels", "counts": {"classes": 5, "per_class": 200}},
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.3, "min_samples": 5},
    "allocation": {"name": "fedeas"},
}
LIGHT = ("data", "partition", "allocation")  # sections whose plug-ins need no torch
IID = {**SMALL, "data": {"name": "labels", "counts": [60, 60]}, "partition": {"name": "iid", "clients": 3}}


def planned(*overrides: str, source=SMALL, **keys):
    return plan(source, overrides, measure_speed=False, **keys)


def test_a_plan_names_keys_of_the_data_that_have_no_effect(tmp_path):
    images, labels = np.zeros((40, 4, 4), np.uint8), np.repeat([0, 1], 20)
    path = tmp_path / "own.npz"
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    source = {**SMALL, "data": {"name": "npz", "path": str(path), "test_fraction": 0.2}}
    note = "data.test_fraction has no effect: the data set npz has a test split of its own"
    assert planned("partition.min_samples=0", source=source).notes == [note]


def fixed(tmp_path, rows, counts, **allocation):
    """A plan whose partition is written out: `rows` of the training split for each client."""
    (tmp_path / "clients.json").write_text(json.dumps(rows))
    return plan(
        {
            "rounds": 1,
            "data": {"name": "labels", "counts": counts},
            "partition": {"name": "file", "path": str(tmp_path / "clients.json")},
            "allocation": allocation,
        },
        measure_speed=False,
    )


def test_the_numbers_of_a_plan_are_those_of_its_definition(tmp_path):
    """Clients (4, 0) and (2, 2): rows 0..5 are class 0, 6 and 7 class 1. Full balance: 4 - 0 = 4 images for client 0.

    Before: I = 4/8 (1 - 0) + 4/8 (1 - 1) = 1/2. After: balanced, so 100 % is removed; 4 of 12 samples are synthetic.
    One cell of four was empty, none is left; one client is touched.
    """
    content = as_json(fixed(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]], [6, 2], name="full"))
    assert (content["real"], content["full_balance"], content["missing_cells"], content["imbalance"]) == (8, 4, 1, 0.5)
    row = content["policies"]["full"]
    assert (row["images"], row["imbalance_removed"], row["of_full_balance"]) == (4, 1.0, 1.0)
    assert row["synthetic_share"] == pytest.approx(4 / 12)
    assert (row["clients_touched"], row["missing_cells"], row["top_20_percent_share"]) == (1, 0, 0.0)


def test_a_plan_counts_what_is_left_out_and_a_shared_pool_once(tmp_path, capsys):
    """Clients (4, 0) and (2, 2). fbl: 2 images for 2 of the 4 samples. A pool of 3 a class: 6 images, 12 held.

    fbl balances both clients without a sample more, so 2 of 8 are synthetic.
    """
    result = fixed(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]], [6, 2], name="server_pool", per_class=3)
    rows = as_json(result)["policies"]
    assert (rows["fbl"]["images"], rows["fbl"]["left_out"], rows["fbl"]["imbalance_removed"]) == (2, 2, 1.0)
    assert rows["fbl"]["synthetic_share"] == 2 / 8
    assert (rows["server_pool"]["images"], rows["server_pool"]["synthetic_share"]) == (6, 12 / 20)
    print_plan(result)
    shown = capsys.readouterr().out
    assert "fbl leaves out 2 real samples" in shown
    assert "server_pool: all clients have the same 6 images, made once" in shown


def test_policies_that_need_a_total_get_exactly_that_of_the_configured_one():
    result = planned("allocation.beta=7")
    rows = result.quotas.rows
    total = fedeas_budget.beta_table(result.counts_KC, [7.0])[0].images
    for name in ("fedeas", "uniform", "size_proportional", "missing_only"):
        assert rows[name].images == rows[name].quota_KC.sum() == total > 0
        assert rows[name].matched == (name != "fedeas")
    assert rows["full"].images == result.full_balance and not rows["full"].matched
    assert 7.0 in [row.beta for row in result.betas]


def test_where_the_configured_policy_makes_nothing_the_total_is_that_of_fedeas():
    result = planned("allocation.name=none", policies="uniform")
    expected = fedeas_budget.beta_table(result.counts_KC, [12.0])[0].images
    assert result.quotas.rows["uniform"].images == expected and result.quotas.reference == "fedeas"
    assert list(result.quotas.rows) == ["uniform", "none"]


def test_the_plan_is_what_a_run_then_makes():
    for policy in ("fedeas", "full"):
        result = planned(f"allocation.name={policy}", "seed=3")
        quota_KC = prepare(load_config(SMALL, [f"allocation.name={policy}", "seed=3"], LIGHT)).quota_KC
        assert np.array_equal(result.quotas.rows[policy].quota_KC, quota_KC)


def test_balanced_clients_get_no_image_and_nothing_is_removed(tmp_path):
    """Two clients of (2, 2): every threshold is 0, and so is the total that the other policies are asked for."""
    content = as_json(fixed(tmp_path, [[0, 1, 4, 5], [2, 3, 6, 7]], [4, 4], name="fedeas", beta=50))
    assert content["imbalance"] == content["full_balance"] == 0
    found = {(row["images"], row["imbalance_removed"]) for row in content["policies"].values()}
    assert found == {(0, 0.0), (0, None)}  # None: of policies that look at training
    assert len(content["policies"]) == 12


def test_a_policy_that_cannot_be_used_says_why_and_only_the_configured_one_fails():
    """Both clients have both classes, so missing_only has no cell for the five images."""
    source = {**IID, "allocation": {"name": "uniform", "total": 5}}
    result = planned(source=source)
    assert "no client lacks a class" in result.quotas.rows["missing_only"].problem
    assert as_json(result)["policies"]["missing_only"]["images"] is None
    result.check()
    with pytest.raises(UserError, match="no client lacks a class"):
        planned("allocation.name=missing_only", source=source).check()


def test_the_lazy_rule_is_the_rule():
    """`choose_beta` stops early; `select_beta` looks at all betas."""
    for seed in range(8):
        for clients in (3, 6, 30):
            counts_KC = planned(f"seed={seed}", f"partition.clients={clients}", "partition.min_samples=1").counts_KC
            assert choose_beta(counts_KC) == fedeas_budget.select_beta(fedeas_budget.beta_table(counts_KC))


def test_beta_auto_shows_every_beta_and_says_so_where_none_satisfies(capsys):
    keys = ("allocation.beta=auto", "partition.clients=100", "partition.alpha=0.05", "partition.min_samples=1")
    result = planned(*keys, source=COUNTS)
    assert [row.beta for row in result.betas] == [float(beta) for beta in fedeas_budget.BETAS]
    assert result.chosen is None and as_json(result)["selected_beta"] is None
    print_plan(result)
    assert "no beta satisfies it" in capsys.readouterr().out
    with pytest.raises(UserError, match="no beta removes 50 %"):
        result.check()


@pytest.mark.parametrize(
    ("alpha", "clients", "least", "full", "fedeas"),
    [
        (0.05, 20, 10, 301_155, 18_271),
        (0.1, 20, 10, 255_490, 13_988),
        (0.3, 20, 10, 166_752, 5_363),
        (0.05, 100, 1, 335_958, 42_695),
        (0.1, 100, 1, 280_206, 35_086),
        (0.3, 100, 1, 180_668, 15_986),
    ],
)
def test_reference_totals_come_out_exactly_with_the_reference_generator(alpha, clients, least, full, fedeas):
    """CIFAR-10 label counts, 30 partitions: the same draws (numpy RandomState 0..29) give the same means.

    This checks partition and policies at once; other generators sample the same distribution, see the next test.
    """
    labels_N = np.repeat(np.arange(10), 5000)
    totals = []
    for seed in range(30):
        state = np.random.RandomState(seed)
        part = dirichlet(labels_N, 10, state, clients=clients, alpha=alpha, min_samples=least)  # type: ignore[arg-type]
        counts_KC = part.counts_KC
        balance = int((counts_KC.max(axis=1, keepdims=True) - counts_KC).sum())
        totals.append((balance, fedeas_budget.beta_table(counts_KC, [12.0])[0].images))
    assert np.rint(np.mean(totals, axis=0)).tolist() == [full, fedeas]


def test_own_partitions_of_cifar10_counts_agree_with_the_reference_and_span_the_published_totals():
    """30 seeds of our generator: means within three standard errors of the reference means, itself one of 30 draws."""
    over = planned(source=COUNTS, policies="full,fedeas", seeds="0-29").seeds
    for name, reference, sd, published in (("full", 255_490, 19_095, 226_783), ("fedeas", 13_988, 1_247, 13_437)):
        found = statistics(over.images[name])
        standard_error = math.hypot(found["sd"], sd) / math.sqrt(30)
        assert abs(found["mean"] - reference) < 3 * standard_error
        assert found["min"] < published < found["max"]
    assert 11 <= statistics(over.beta[:20])["median"] <= 14


def test_seeds_are_summarised_with_n_minus_one():
    """1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, 14 / 2 = 7; the NaN of a seed that cannot does not count."""
    found = statistics(np.array([1.0, 2.0, np.nan, 6.0]))
    assert (found["n"], found["mean"], found["median"], found["min"], found["max"]) == (3, 3.0, 2.0, 1.0, 6.0)
    assert found["sd"] == pytest.approx(math.sqrt(7))
    assert statistics(np.array([4.0]))["sd"] is None and statistics(np.array([np.nan]))["mean"] is None


def test_the_seeds_of_a_plan_are_the_partitions_of_these_seeds():
    over = planned(seeds="2,5", policies="fedeas").seeds
    assert over.images["fedeas"].tolist() == [
        float(planned(f"seed={seed}", policies="fedeas").quotas.rows["fedeas"].images) for seed in (2, 5)
    ]


def test_seeds_are_read_as_ranges_and_lists():
    assert parse_seeds("0-3,7") == [0, 1, 2, 3, 7] and parse_seeds([4, 2]) == [4, 2]
    for wrong in ("", "3-1", "a", "1,,2", "-3", "0-4,2", "0-99999999"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(wrong)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"policies": "fedes"}, "did you mean 'fedeas'"),
        ({"betas": "4,x"}, "--betas"),
        ({"betas": "0"}, "greater than 0"),
        ({"betas": "nan"}, "--betas"),
        ({"seeds": "9-0"}, "--seeds"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_by_name(keys, said):
    with pytest.raises(UserError, match=said):
        planned(**keys)


def test_a_misspelt_key_is_refused():
    with pytest.raises(ConfigError, match=r"partition\.aplha = 0\.1: no such key; did you mean 'alpha'"):
        planned("partition.aplha=0.1")


def test_the_saved_partition_comes_back_with_the_same_hash(monkeypatch, capsys, tmp_path):
    for name in ("p.json", "p.npz"):
        path = tmp_path / "sub" / name
        arguments = ["plan", str(COUNTS), "--no-measure", "--json", "--policies", "none"]
        content = json.loads(call(monkeypatch, capsys, *arguments, "--save-partition", str(path))[1])
        again = call(monkeypatch, capsys, *arguments, "partition.name=file", f"partition.path={path}")[1]
        assert json.loads(again)["partition_sha256"] == content["partition_sha256"]


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["raysim", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    output = capsys.readouterr()
    return int(stopped.value.code or 0), output.out, output.err


def test_the_table_fits_100_columns_and_says_which_totals_are_matched(capsys):
    result = planned("partition.clients=5", seeds="0-3")
    speed = Speed(0.5, 2, "time: reckoned")
    dataset = load_dataset(load_config({**SMALL, "data": {"name": "digits"}}, (), LIGHT))
    wide = type(result)(**{**vars(result), "speed": speed, "dataset": dataset, "counts_KC": result.counts_KC * 100_000})
    for shown in (result, wide):
        print_plan(shown)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100 and "…" not in out
        assert "uniform *" in out and "* needs a total: asked for that of fedeas" in out
        assert "4 seeds" in out and "selection rule" in out


def test_sizes_have_the_unit_that_suits_them():
    assert [size(n) for n in (0, 999, 1000, 41_276_928, 999_600_000)] == ["0 B", "999 B", "1.0 kB", "41.3 MB", "1.0 GB"]


def test_json_goes_alone_to_standard_output_and_a_policy_that_cannot_work_gives_code_2(monkeypatch, capsys):
    arguments = ["plan", str(COUNTS), "--no-measure", "--json", "--betas", "4,12", "--policies", "full"]
    code, out, err = call(monkeypatch, capsys, *arguments)
    content = json.loads(out)
    assert code == 0 and err == "" and [row["beta"] for row in content["betas"]] == [4.0, 12.0]
    assert set(content["policies"]) == {"full", "fedeas"} and content["real"] == 50_000
    code, out, err = call(monkeypatch, capsys, *arguments, "allocation.name=uniform")
    assert code == 2 and "allocation.total is required" in err and json.loads(out)["policies"]["uniform"]["problem"]


def test_the_reference_counts_are_reproduced_with_numpys_own_stream():
    """The reference means come from the partitions of numpy RandomState(0), ..., RandomState(29)."""
    over = planned("partition.stream=numpy", source=COUNTS, policies="full,fedeas", seeds="0-29").seeds
    fedeas, full = (statistics(over.images[name]) for name in ("fedeas", "full"))
    assert [round(fedeas[key]) for key in ("mean", "min", "max")] == [13_988, 10_098, 15_961]
    assert [round(full[key]) for key in ("mean", "min", "max")] == [255_490, 193_010, 298_170]


def test_numpys_stream_is_refused_where_it_cannot_serve():
    assert planned("partition.stream=numpy").partition.sha256() != planned().partition.sha256()
    with pytest.raises(UserError, match=r"partition\.stream = numpy: each client of dirichlet_client has a stream"):
        planned("partition.name=dirichlet_client", "partition.stream=numpy")
    with pytest.raises(UserError, match=r"seed = 4294967296: .* seeds below 2\^32"):
        planned("partition.stream=numpy", "seed=4294967296")


def test_places_that_cannot_be_written_are_refused_before_the_plan(monkeypatch, capsys, tmp_path):
    """The configuration does not exist, which the plan itself would say first."""
    (tmp_path / "file").write_text("")
    for option, value, said in (
        ("--figures", tmp_path / "file" / "sub", "--figures: the folder"),
        ("--figures", tmp_path / "file", "cannot be made (File exists); name another"),
        ("--save-partition", tmp_path / "clients.csv", "a partition is saved as .json or .npz"),
        ("--save-partition", tmp_path / "file" / "clients.npz", "--save-partition: the folder"),
    ):
        code, _, err = call(monkeypatch, capsys, "plan", "nowhere.yaml", option, str(value))
        assert code == 2 and said in err and "nowhere.yaml" not in err


def test_figures_are_drawn_for_the_policies_that_make_images(tmp_path):
    paths = draw(planned(policies="none,fedeas,full"), tmp_path)
    assert [path.name for path in paths] == ["counts_fedeas.png", "counts_full.png", "lorenz.png", "budget.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)


def test_a_plan_of_counts_loads_no_torch_ray_or_mlflow_and_takes_under_3_seconds():
    """100 clients, CIFAR-10 label counts; processor time of the whole process, which other work does not stretch."""
    script = (
        f"import sys; sys.argv = ['raysim', 'plan', {str(COUNTS)!r}, '--no-measure', 'partition.clients=100', "
        "'partition.min_samples=1']\nfrom raysim import cli\ntry: cli.main()\n"
        "except SystemExit as stop: print('loaded', stop.code, sorted(set(sys.modules) & {'torch', 'ray', 'mlflow'}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "loaded 0 []"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_the_generator_is_timed_on_its_own_data_and_else_the_reason_is_given():
    keys = {"rounds": 1, "data": {"name": "digits"}, "generator": {"name": "ddpm", "steps": 2, "batch_size": 16}}
    config = load_config(keys)
    dataset = prepare(config).dataset
    speed = measure(config, dataset)
    assert speed.images_per_s is not None and speed.images_per_s > 0
    assert speed.seconds(100) == pytest.approx(100 / (speed.images_per_s * speed.lanes))
    missing = measure(load_config({**keys, "generator": {"name": "ddpm", "weights": "nowhere/at/all"}}), dataset)
    assert missing.images_per_s is None and missing.seconds(5) is None and "nowhere/at/all" in missing.note
    counted = plan(SMALL)
    assert counted.speed is not None and "has no images" in counted.speed.note


def test_the_rounds_are_timed_and_a_round_lasts_as_long_as_its_largest_client():
    """Clients of 10, 20 and 70 images, 1 s each, 2 workers: 70 s a round; 3 test images of 2 s after rounds 0, 2, 3."""
    config = load_config({**SMALL, "rounds": 3, "evaluate_every": 2, "local": {"name": "sgd", "batch_size": 10}})
    dataset = prepare(load_config({"rounds": 1, "data": {"name": "digits", "test_samples": 3}})).dataset
    speed = TrainingSpeed(1.0, 2.0, 2, "")
    sizes_K = np.array([10, 20, 70])
    assert speed.seconds(config, dataset, sizes_K) == pytest.approx(3 * 70 + 3 * 3 * 2 / 2)
    equal = load_config(config.resolved(), ["local.steps=4"])
    assert speed.seconds(equal, dataset, sizes_K) == pytest.approx(3 * 3 * 4 * 10 / 2 + 9)


def test_what_a_policy_asks_for_is_timed_with_the_rounds():
    """`gap` asks twice for the models of 3 clients: a round of 70 s, and 4 models on 5 images of 2 s on 2 workers."""
    section = {"name": "gap", "at": [1, 2], "total": 8}
    keys = {**SMALL, "rounds": 3, "local": {"name": "sgd", "batch_size": 10}, "allocation": section}
    config = load_config(keys)
    dataset = prepare(load_config({"rounds": 1, "data": {"name": "digits", "test_samples": 3}})).dataset
    dataset = replace(dataset, validation_labels_N=np.arange(5))
    sizes_K, speed = np.array([10, 20, 70]), TrainingSpeed(1.0, 2.0, 2, "")
    rounds_s = speed.seconds(config, dataset, sizes_K)
    schedule = AllocationSchedule.of(config.allocation, np.ones((3, 10), dtype=np.int64))
    assert rounds_s is not None
    assert speed.seconds(config, dataset, sizes_K, schedule) == pytest.approx(rounds_s + 2 * (70 + 4 * 5 * 2 / 2))
    loss = load_config({**keys, "allocation": {**section, "name": "loss_guided"}})  # of the global model alone
    schedule = AllocationSchedule.of(loss.allocation, np.ones((3, 10), dtype=np.int64))
    assert speed.seconds(loss, dataset, sizes_K, schedule) == pytest.approx(rounds_s + 2 * 5 * 2 / 2)


def test_training_is_timed_with_the_steps_of_the_run_and_else_the_reason_is_given(capsys):
    keys = {"rounds": 4, "data": {"name": "digits", "train_samples": 200, "test_samples": 60}}
    result = plan(keys, ["local.name=scaffold", "model.width=8", "generator.steps=1"], policies="none,full")
    assert result.training is not None and result.training.per_image_s is not None and result.training.per_image_s > 0
    full, none = (result.training_s(result.quotas.rows[name]) for name in ("full", "none"))
    assert full is not None and none is not None and full > none > 0
    print_plan(result)
    out = capsys.readouterr().out
    assert "local steps" in out and "training: a local step of 32 images took" in out and "…" not in out
    counted = plan(SMALL)
    assert counted.training is not None and "training was not timed" in counted.training.note
