"""What `pip install` brings: the package as it is built, and nothing that only a clone has."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_carries_every_module_the_weights_and_the_examples_once(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "raysim").rglob("*.py")}
    wanted |= {f"raysim/{path.relative_to(ROOT)}" for path in (ROOT / "experiments").rglob("*.yaml")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "raysim/generation/weights").rglob("*.*")}
    assert wanted <= set(names) and len(names) == len(set(names))
    assert not [name for name in names if not name.startswith(("raysim/", "raysim-"))]
    [points] = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert "[mlflow.app]\nraysim = raysim.tracking.training_pages:app" in points
