"""`benchmarks/gpu.py` is run once on a lent machine: a section that fails or is late costs the others nothing."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module
    spec.loader.exec_module(module)
    return module


WRITES = "import sys, time; out = open(sys.argv[1], 'a'); out.write('{\"n\": 1}\\n{\"n\": 2}\\n{\"n\"'); out.flush(); "


@pytest.mark.parametrize(
    ("then", "limit_s", "problem"),
    [("", 60, ""), ("sys.exit('no such device')", 60, "no such device"), ("time.sleep(600)", 2, "stopped after 2 s")],
)
def test_what_a_section_has_measured_is_kept_however_it_ends(gpu: Any, then: str, limit_s: float, problem: str):
    """A row that is only half written is left out."""
    found = gpu.in_own_process([sys.executable, "-c", WRITES + then], limit_s)
    assert found in (([{"n": 1}, {"n": 2}], problem), ([], "stopped after 2 s"))  # on a machine too busy to start it


def test_every_question_has_its_answer_or_why_there_is_none(gpu: Any):
    rows = [
        {"section": "batching", "model": "cnn", "precision": precision, "way": way, "ms_per_step": ms, **more}
        for precision, way, ms, more in (
            ("float32", "alone", 6.0, {}), ("float32", "at once", 2.0, {"group": 32, "times_as_fast": 3.0}),
            ("bf16", "alone", 8.0, {}), ("bf16", "at once", 1.0, {"group": 32, "times_as_fast": 8.0}),
        )
    ]
    rows.append({"section": "batching", "model": "big", "precision": "bf16", "way": "at once", "why_not": "too big"})
    rows += [
        {"section": "workers", "way": "alone", "precision": "float32", "processes": n, "images_per_s": rate}
        for n, rate in ((1, 1000.0), (2, 1900.0), (4, 1500.0))
    ]
    rows += [{"section": "task", "way": "alone", "expected_s": 20.0}, {
        "section": "task", "way": "at once", "processes": 2, "rounds": 1500, "seconds": 21.0, "with_ray_s": 40.5,
        "all_rounds": True,
    }]
    assert gpu.answers(rows, {"generation": "stopped after 60 s"}) == {
        "batched or not": "cnn in float32, 32 at once: 3.00 times as fast as alone; cnn in bf16, 32 at once: 8.00 "
                          "times as fast as alone; big in bf16: alone, too big",
        "bf16": "cnn alone: 0.75 times as fast as float32; cnn at once (32): 2.00 times as fast as float32",
        "workers per GPU": "alone: most with 2, 1,900 images a second, 1.90 times those with 1",
        "generation": "not answered: stopped after 60 s",
        "1,500 rounds": "1,500 rounds took 21.0 s (processes: 2; at once): within 30 s; about 40.5 s with what Ray "
                        "adds",
    }


def test_all_sections_together_end_in_six_minutes(gpu: Any):
    assert set(gpu.LIMIT_S) == set(gpu.SECTIONS)
    assert sum(gpu.LIMIT_S.values()) <= gpu.TOTAL_S < 360


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_dry_run_answers_every_question_without_ray_and_mlflow(tmp_path: Path):
    without = tmp_path / "sitecustomize.py"
    without.write_text("import sys\nsys.modules['ray'] = sys.modules['mlflow'] = None\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{SCRIPT.parents[1]}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run"], capture_output=True, text=True, env=environment, check=False
    )
    assert not done.returncode, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["failed"]
    assert len(result["answers"]) == 5 and not any(a.startswith("not answered") for a in result["answers"].values())
