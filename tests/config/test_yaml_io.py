"""YAML is read as it is written: what means another number, or grows without bound, is refused with its line."""

import pytest

from raysim.config.load import load_config
from raysim.config.yaml_io import MOST_BYTES, MOST_DEPTH, joined, parse_yaml, plain_copy, read_yaml
from raysim.core.errors import ConfigError

YAML = "data: {name: digits}\nrounds: 3\n"


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "file")
    [problem] = caught.value.problems
    assert len(problem) < 300
    return problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("010", "010 is 8 to YAML, which reads it in base 8; write 8, or 10, or '010' in quotes if it is text"),
        ("-010", "-010 is -8 to YAML, which reads it in base 8; write -8, or -10, or "),
        ("00", "00 is 0 to YAML, which reads it in base 8; write 0, or '00' in quotes"),
        ("12:30:45", "12:30:45 is 45045 to YAML, which reads it in base 60; write 45045, or '12:30:45' in quotes"),
        ("10:30", "10:30 is 630 to YAML, which reads it in base 60; write 630, or '10:30' in quotes"),
        ("1:30.5", "1:30.5 is 90.5 to YAML, which reads it in base 60; write 90.5"),
        ("1_0", "1_0 is 10 to YAML, which reads it without its underscores; write 10, or '1_0' in quotes"),
        ("1_000.5", "1_000.5 is 1000.5 to YAML, which reads it without its underscores; write 1000.5"),
        ("0x1_F", "0x1_F is 31 to YAML, which reads it without its underscores; write 31"),
        ("!!int '010'", "010 is 8 to YAML"),
        ("2024-01-13", "2024-01-13 is a date to YAML; put the value in quotes"),
        ("2024-01-13 10:00:00", "2024-01-13 10:00:00 is a date to YAML; put the value in quotes"),
        ("!!binary aGk=", "YAML's type 'binary' is not used here"),
        ("!!set {a}", "YAML's type 'set' is not used here"),
        ("!!python/object/apply:os.getcwd []", "YAML's type 'python/object/apply:os.getcwd' is not used here"),
    ],
)
def test_a_number_that_yaml_reads_as_another_one_is_refused_in_files_and_overrides(tmp_path, text, said):
    assert refused(f"a: 1\nb: {text}\n").startswith(f"line 2: {said}")
    assert refused(f"a:\n  - [1, {text}]\n").startswith(f"line 2: {said}")
    (tmp_path / "x.yaml").write_text(f"{YAML}seed: {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "x.yaml")
    assert caught.value.problems[0].startswith(f"line 3: {said}")
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"name": "digits"}, "rounds": 3}, [f"seed={text}"])
    assert caught.value.problems[0].startswith(f"override {f'seed={text}'!r}: {said}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("10", 10), ("-3", -3), ("0.10", 0.1), ("1e-3", 1e-3), ("1E5", 1e5), ("0x1F", 31), ("'010'", "010"),
        ("!!str 010", "010"), ("127.0.0.1:6379", "127.0.0.1:6379"), ("host:6379", "host:6379"), ("a_b", "a_b"),
        ("_1", "_1"), ("08", "08"), ("yes", True), ("off", False), ("~", None), ("", None), ("1.5.2", "1.5.2"),
    ],
)  # fmt: skip
def test_what_means_one_thing_is_read_as_before(text, value):
    read = parse_yaml(f"a: {text}\n", "file")["a"]
    assert read == value and type(read) is type(value)


def test_text_that_yaml_takes_for_a_truth_value_is_named_as_such():
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"name": "digits"}, "rounds": 3}, ["tracking.experiment=no"])
    assert caught.value.problems == [
        "tracking.experiment = false: must be text; to YAML, yes, no, on and off are true and false: put the word in "
        "quotes"
    ]


@pytest.mark.parametrize("text", ["[" * 3000, "[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000, "- " * 3000])
def test_brackets_nested_without_end_are_refused(text):
    assert refused(text) == f"line 1: brackets or lists are nested more than {MOST_DEPTH} deep"
    with pytest.raises(ConfigError, match="nested more than"):
        load_config({"data": {"name": "digits"}, "rounds": 3}, [f"seed={text}"])


def test_as_deep_as_is_allowed_is_read():
    """49 lists in each other, and the number in the innermost: 50."""
    value = parse_yaml("[" * (MOST_DEPTH - 1) + "7" + "]" * (MOST_DEPTH - 1), "file")
    for _ in range(MOST_DEPTH - 1):
        [value] = value
    assert value == 7


def test_anchors_that_grow_without_bound_are_refused():
    """Nine lists of ten of the one before: 10^10 numbers from 200 characters; 60 lists in each other, one by one."""
    wide = "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        wide += f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n"
    assert "stand for" in refused(wide) and "write out what is meant" in refused(wide)
    deep = "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(60))
    assert "deep; write out what is meant" in refused(deep)


@pytest.mark.parametrize("text", ["&a [*a]", "a: &x {b: *x}", "a: &x [1, {b: [*x]}]"])
def test_an_anchor_that_contains_itself_is_refused(text):
    assert refused(text) == "line 1: this anchor contains itself; write the value out"


def test_anchors_as_people_use_them_are_read():
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n", "file") == {
        "a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}
    }


def test_a_file_without_end_is_not_read_to_its_end(tmp_path):
    with pytest.raises(ConfigError, match="larger than 10,000,000 bytes"):
        read_yaml("/dev/zero")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(tmp_path / "large.yaml")


def test_mappings_from_python_are_held_to_the_same():
    loop: dict = {}
    loop["a"] = loop
    deep: list = []
    for _ in range(3000):
        deep = [deep]
    less: list = []
    for _ in range(60):
        less = [less]
    for mapping in (loop, {"a": deep}, {("a", "b"): 1}, {"a": 10**5000}, {"a": less}):
        with pytest.raises(ConfigError):
            plain_copy(mapping)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("qickstart.yaml", "experiments/quickstart.yaml"),
        ("experiments/quickstrat.yaml", "quickstart.yaml"),
        ("w1.yaml", "experiments/speed/w1.yaml"),
        ("mine.yml", "mine.yaml"),
    ],
)
def test_a_path_that_is_not_there_is_answered_with_the_file_that_was_meant(tmp_path, monkeypatch, written, meant):
    monkeypatch.chdir(tmp_path)
    for name in ("cluster.yaml", "mine.yaml", "experiments/quickstart.yaml", "experiments/speed/w1.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(YAML)
    with pytest.raises(ConfigError) as caught:
        load_config(written)
    assert f"did you mean {meant!r}?" in caught.value.problems[0]


def test_an_experiment_that_comes_with_raysim_is_suggested_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart'"):
        load_config("quickstrat.yaml")
    with pytest.raises(ConfigError, match="the path of the configuration comes first, then KEY=VALUE"):
        load_config("rounds=5")


@pytest.mark.parametrize(
    ("content", "command"),
    [
        ("base: x.yaml\ngrid: {seed: [0]}\n", "this is the configuration of a sweep; use `raysim sweep x.yaml`"),
        ("data: {name: digits}\nunet: {}\nsteps: 3\n", "the training of a generator; use `raysim pretrain x"),
        ("cluster_name: x\nprovider: {}\n", "this is the configuration of a cluster; use `ray up x.yaml`"),
    ],
)
def test_a_file_for_another_command_names_that_command(tmp_path, monkeypatch, content, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml")
    [problem] = caught.value.problems
    assert command in problem


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["a=1", "p.noisy={fraction:", "0.3,", "rate:", "0.4}", "b=[1,", "2]"],
         ["a=1", "p.noisy={fraction: 0.3, rate: 0.4}", "b=[1, 2]"]),
        (["a={x: 1}", "b=[]"], ["a={x: 1}", "b=[]"]),
        (['a=["{"]', "b=2"], ['a=["{"]', "b=2"]),
        (["a={x", "b=2"], ["a={x", "b=2"]),
        (["a=text {", "b=2"], ["a=text {", "b=2"]),
        ([], []),
    ],
)  # fmt: skip
def test_what_a_shell_has_split_inside_brackets_is_put_together_again(texts, whole):
    """As `ray submit` lets the remote shell do with `p.noisy={fraction: 0.3, rate: 0.4}`, quoted or not."""
    assert joined(texts) == whole


def test_a_path_of_300_characters_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"aaa.* cannot be read: File name too long"):
        read_yaml("a" * 300 + ".yaml")
