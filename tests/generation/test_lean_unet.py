"""The quick way in to diffusers' UNet2DModel, each time in a process that has imported torch and no more."""

import json
import subprocess
import sys

import pytest

CODES = {
    "as it is": """
import sys
from raysim.generation.lean_unet import unet_class
quick = unet_class()
parts = ("torch._dynamo", "scipy.stats", "diffusers.models.transformers", "transformers")
print([name for name in parts if name in sys.modules])
from diffusers import DDPMPipeline, UNet2DConditionModel, UNet2DModel
import torch
from diffusers.models import transformers
torch.compiler.disable(print)
print(unet_class() is UNet2DModel is quick, "torch._dynamo" in sys.modules, transformers.__file__ is None)
""",
    "laid out differently": """
import sys
from raysim.generation import lean_unet
lean_unet.PARTS = ("diffusers.models.unets", "diffusers.models.attention", "torch._dynamo")
print(lean_unet.unet_class().__name__, "torch._dynamo" in sys.modules)
""",
    "moved": """
import sys
from raysim.generation import lean_unet
lean_unet._MODULE = "diffusers.models.elsewhere"
print(lean_unet.unet_class().__name__)
""",
}
FORKS = """
import json, os, subprocess, sys
import torch
assert not [name for name in ("torch._dynamo", "diffusers", "scipy") if name in sys.modules]
printed = {}
for name, code in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 1)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with open(read) as file:
        printed[name] = file.read()
    os.wait()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each code prints: torch is loaded once, and its process then splits for each of them."""
    command = [sys.executable, "-c", FORKS, json.dumps(CODES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_network_comes_without_the_compiler_and_the_models_beside_it_which_are_there_when_asked_for(printed):
    assert printed["as it is"].splitlines() == ["[]", "True True False"]


def test_a_diffusers_that_is_laid_out_differently_is_imported_in_full(printed):
    assert printed["laid out differently"].split() == ["UNet2DModel", "True"]


def test_a_diffusers_that_has_moved_the_network_is_asked_by_its_public_name(printed):
    assert printed["moved"].split() == ["UNet2DModel"]
