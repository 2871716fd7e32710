"""Plug-ins of the user's own: a wrong answer and an exception end as one message that says what and where."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim import cli
from raysim.allocation import policies
from raysim.commands.plan.plan import plan
from raysim.config.load import load_config
from raysim.config.plugin_guard import ask_policy, checked_dataset, checked_images, checked_partition
from raysim.config.registry import resolve
from raysim.core.errors import RunError, UserError
from raysim.core.records import Allocation
from raysim.lifecycle.prepare import load_dataset, make_partition, prepare

LIGHT = ("data", "partition", "allocation")
BASE = {"rounds": 1, "data": {"name": "digits", "train_samples": 100}, "partition": {"name": "iid", "clients": 4}}
COUNTS = np.array([[3, 0], [1, 2]])

MODULE = '''
from dataclasses import replace
import numpy as np
from raysim.data.datasets import digits
from raysim.data.partitions import iid

def halves(counts_KC): return counts_KC / 2
def nothing(counts_KC): pass
def changes(counts_KC): counts_KC += 1; return counts_KC
def fails(counts_KC):
    return {}["beta"]
def small_ints(counts_KC): return np.ones_like(counts_KC, dtype=np.int16)

def broken_data():
    raise FileNotFoundError("no such drive")
def float_labels():
    split = digits()
    return replace(split, train_labels_N=split.train_labels_N.astype(float))

def twice(labels_N, classes, rng, *, clients: int = 4):
    dealt = iid(labels_N, classes, rng, clients=clients)
    return replace(dealt, indices=np.zeros_like(dealt.indices))
def shares(labels_N, classes, rng, *, clients: int = 4):
    return twice(labels_N, classes, rng, clients=clients)
shares.replacement = True

class bad_rule:
    """Raises when it first weighs."""
    needs, streams = (), False
    def weights(self, table, updates):
        raise IndexError("no client seven")
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's own; its path."""
    path = tmp_path / "my_code.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("my_code", None)


def line(path: Path, text: str) -> str:
    """`path:line` of the first line of a file that holds this text."""
    return f"{path}:{next(i for i, found in enumerate(path.read_text().splitlines(), 1) if text in found)}"


def refused(**sections: str) -> str:
    """What `prepare` says to BASE with these plug-ins."""
    with pytest.raises(UserError) as caught:
        prepare(load_config(BASE, [f"{section}.name=my_code:{name}" for section, name in sections.items()], LIGHT))
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (COUNTS / 2, "it returned an array of float64"),
        (COUNTS > 1, "it returned an array of bool"),
        (COUNTS[0], "it returned an array of shape (2,)"),
        (COUNTS - 1, "it returned -1 images for client 0 and class 1"),
        (None, "it returned None"),
        ([[1, 2], [3, 4]], "it returned a list"),
        (np.full((2, 2), 2**62), "it returned 1.84e+19 images in all, and raysim counts up to 1e+15"),  # wraps to 0
    ],
)
def test_an_answer_that_is_no_quota_is_refused_with_what_is_right(answer, said):
    with pytest.raises(UserError) as caught:
        ask_policy("mine:policy", lambda _: answer, COUNTS, {})
    text = str(caught.value)
    assert text.startswith(f"allocation.name = mine:policy: {said}; a policy must return")
    assert "whole numbers >= 0" in text and "shape (2, 2)" in text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Allocation(COUNTS, COUNTS / 2), "it returned a keep_KC that is an array of float64; a policy must return"),
        (Allocation(COUNTS, COUNTS[0]), "it returned a keep_KC that is an array of shape (2,)"),
        (Allocation(None), "it returned a quota_KC that is None"),
        (Allocation(COUNTS, COUNTS + 1), "it returned a keep_KC of 4 for client 0 and class 0, of which it has 3 real"),
        (
            Allocation(np.array([[0, 0], [0, 1]]), np.zeros_like(COUNTS)),
            "it returned a keep_KC that empties client 0: none of its 3 real samples is kept and it gets no image",
        ),
    ],
)
def test_what_a_policy_keeps_is_checked(answer, said):
    with pytest.raises(UserError) as caught:
        ask_policy("mine:policy", lambda _: answer, COUNTS, {})
    assert str(caught.value).startswith(f"allocation.name = mine:policy: {said}")


def test_a_policy_asks_by_name_and_what_is_not_known_is_refused():
    """A parameter with a default is optional; keeping everything is the same as not saying so."""

    def asks(counts_KC, seed):
        return Allocation(counts_KC * seed, counts_KC)

    answer = ask_policy("mine:asks", asks, COUNTS, {}, given={"seed": 3})
    assert answer.quota_KC.tolist() == (3 * COUNTS).tolist() and answer.keep_KC is None
    with pytest.raises(UserError, match=r"allocation.name = mine:asks: it asks for seed, not known here"):
        ask_policy("mine:asks", asks, COUNTS, {})


def test_a_policy_that_asks_for_what_there_is_not_is_no_plug_in(tmp_path, monkeypatch):
    (tmp_path / "asking_policy.py").write_text("def p(counts_KC, seeds, *, total=None):\n    return counts_KC\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match=r"it asks for seeds; did you mean 'seed'\? a policy may ask for seed"):
        resolve("allocation", "asking_policy:p")


def test_a_policy_that_leaves_python_is_named():
    def leaves(_):
        raise SystemExit(3)

    with pytest.raises(UserError, match=r"SystemExit: 3"):
        ask_policy(f"{__name__}:leaves", leaves, COUNTS, {})


def raises(error, _):
    raise error


def test_whatever_a_policy_raises_ends_in_a_message_of_some_lines():
    class Stop(BaseException):
        """No Exception."""

    class Silent(Exception):
        def __str__(self):
            raise TypeError("nothing to say")

    for error, said in (
        (Stop("here"), "Stop: here ("),
        (Silent(), "Silent: (its message raises TypeError) ("),
        (ValueError("x" * 1_000_000), f"ValueError: {'x' * 1000} ... (998,000 characters) ... x"),
    ):
        with pytest.raises(UserError) as caught:
            ask_policy(f"{__name__}:raises", partial(raises, error), COUNTS, {})
        assert str(caught.value).startswith(f"allocation.name = {__name__}:raises: {said}")
        assert len(str(caught.value)) < 3_000


def test_images_that_no_memory_could_hold_are_refused_with_the_arithmetic():
    """10^11 images of 8 x 8 bytes are 6,400 GB."""
    config = load_config(BASE, ["allocation.name=uniform", "allocation.total=100000000000"], LIGHT)
    with pytest.raises(UserError, match=r"100,000,000,000 images of 1 x 8 x 8 bytes, 6,400 GB in all"):
        prepare(config)


def test_a_quota_of_small_integers_counts_as_whole_numbers():
    quota_KC = ask_policy("mine:policy", lambda _: np.ones((2, 2), np.uint8), COUNTS, {}).quota_KC
    assert quota_KC.dtype == np.int64 and quota_KC.tolist() == [[1, 1], [1, 1]]


def test_plans_and_runs_refuse_a_bad_policy_alike_and_name_its_line(mine):
    for name, said in (
        ("halves", "it returned an array of float64"),
        ("nothing", "it returned None"),
        ("changes", f"ValueError: output array is read-only ({line(mine, 'def changes')})"),
        ("fails", f"KeyError: 'beta' ({line(mine, 'beta')})"),
    ):
        assert f"allocation.name = my_code:{name}: {said}" in refused(allocation=name)
        problem = plan(BASE, [f"allocation.name=my_code:{name}"], measure_speed=False).quotas.rows[f"my_code:{name}"]
        assert said in problem.problem
    with pytest.raises(UserError, match=r"allocation\.total\.of = my_code:halves: it returned an array of float64"):
        policies.uniform(COUNTS, total={"of": "my_code:halves"})


def test_the_command_line_answers_in_one_line_with_code_2(mine, monkeypatch, capsys, tmp_path):
    (tmp_path / "experiment.yaml").write_text("rounds: 1\ndata: {name: digits}\n")
    arguments = ["plan", str(tmp_path / "experiment.yaml"), "--no-measure", "partition.name=my_code:twice"]
    monkeypatch.setattr(sys, "argv", ["raysim", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: partition.name = my_code:twice: it returned a partition that")


def test_data_and_partitions_of_the_users_own_are_checked(mine):
    assert f"data.name = my_code:broken_data: FileNotFoundError: no such drive ({mine}:" in refused(data="broken_data")
    assert "data.name = my_code:float_labels: it returned train_labels_N that are" in refused(data="float_labels")
    assert "a sample belongs to one client at most (unless the function has" in refused(partition="twice")
    assert prepare(load_config(BASE, ["partition.name=my_code:shares"], LIGHT)).partition.clients == 4


def test_every_part_of_a_data_set_is_checked():
    dataset = load_dataset(load_config({"rounds": 1, "data": {"name": "digits"}}, (), LIGHT))
    as_int32 = checked_dataset(replace(dataset, train_labels_N=dataset.train_labels_N.astype(np.int32)), "mine:data")
    assert as_int32.train_labels_N.dtype == np.int64
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"train_images": dataset.train_images / 255}, "train_images of float64"),
        ({"test_images": dataset.test_images[:, 0]}, "test_images of uint8 of 3 dimensions"),
        ({"train_labels_N": dataset.train_labels_N[1:]}, "train_labels_N that are not one whole number for each"),
        ({"test_labels_N": dataset.test_labels_N + 1}, "test_labels_N of 1 to 10; the 10 class_names allow 0 to 9"),
        ({"test_images": dataset.test_images[..., 1:]}, "test images of another size"),
        ({"mean": (0.5, 0.5)}, "not one finite number for each channel"),
        ({"mean": (float("nan"),)}, "not one finite number for each channel"),
        ({"std": (float("inf"),)}, "not one finite number for each channel"),
        ({"mean": (127.5,), "std": (60.0,)}, "not those of pixels from 0 to 1; divide those of bytes by 255"),
    ]
    for changes, said in wrong:
        with pytest.raises(UserError, match=r"data\.name = mine:data: it returned") as caught:
            checked_dataset(replace(dataset, **changes), "mine:data")
        assert said in str(caught.value)
    with pytest.raises(UserError, match="a dict; a data set must return"):
        checked_dataset({}, "mine:data")


def test_every_part_of_a_partition_is_checked():
    config = load_config(BASE, (), LIGHT)
    good = make_partition(config, load_dataset(config))
    assert checked_partition(good, 100, 10, "mine:deal", shared=False).sha256() == good.sha256()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"indices": good.indices + 1}, "row 100 does not exist; the training split has the rows 0 to 99"),
        ({"indices": good.indices * 1.0}, "no flat arrays of whole numbers"),
        ({"offsets_K1": good.offsets_K1[:-1]}, "do not ascend from 0 to the number of indices, 100"),
        ({"labels": good.labels[1:]}, "not as many as the indices"),
        ({"rare_K": good.rare_K[1:]}, "not as many as the indices"),
        ({"labels": good.labels + 5}, "its labels are 5 to 14, but the data set has the classes 0 to 9"),
        ({"classes": 9}, "it is made for 9 classes, but the data set has 10"),
        ({"indices": np.zeros_like(good.indices)}, "row 0 comes twice; a sample belongs to one client at most (unless"),
    ]
    for changes, said in wrong:
        with pytest.raises(UserError, match=r"partition\.name = mine:deal: it returned") as caught:
            checked_partition(replace(good, **changes), 100, 10, "mine:deal", shared=False)
        assert said in str(caught.value)


def test_images_of_another_type_or_shape_are_refused():
    assert checked_images(np.zeros((2, 1, 8, 8), np.uint8), (2, 1, 8, 8), "mine:gen").shape == (2, 1, 8, 8)
    for images in (np.zeros((2, 1, 8, 8)), np.zeros((1, 1, 8, 8), np.uint8), None, [[[[0]]]]):
        with pytest.raises(RunError, match=r"mine:gen: sample returned .*of shape \(2, 1, 8, 8\).*clamp"):
            checked_images(images, (2, 1, 8, 8), "mine:gen")


def test_what_a_rule_of_the_users_own_raises_in_training_is_a_failed_run_with_its_line(mine, run, small):
    with pytest.raises(RunError) as caught:
        run({**small, "aggregation": {"name": "my_code:bad_rule"}})
    assert str(caught.value) == (
        f"aggregation.name = my_code:bad_rule: IndexError: no client seven ({line(mine, 'no client seven')})"
    )


def test_a_failing_client_names_the_line_of_the_algorithm(run, small):
    small |= {"clients_per_round": 1.0, "resources": {"workers": 1}}
    with pytest.raises(RunError) as caught:
        run({**small, "local": {"name": "tiny_algorithms:raises"}})
    path = Path(__file__).parents[1] / "tiny_algorithms.py"
    said = f"local.name = tiny_algorithms:raises: ZeroDivisionError: no luck today ({line(path, 'no luck today')})"
    assert str(caught.value) == f"client 3 failed in round 2: {said}"
