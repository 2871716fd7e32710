"""The quick way in to diffusers' UNet2DModel, each time in a process of its own, which has imported nothing yet."""

import subprocess
import sys


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout


def test_the_network_comes_without_the_compiler_and_the_models_beside_it_which_are_there_when_asked_for():
    printed = python("""
import sys
from raysim.generation.lean_unet import unet_class
quick = unet_class()
print([name for name in ("torch._dynamo", "scipy.stats", "diffusers.models.transformers") if name in sys.modules])
from diffusers import DDPMPipeline, UNet2DConditionModel, UNet2DModel
import torch
from diffusers.models import transformers
torch.compiler.disable(print)
print(unet_class() is UNet2DModel is quick, "torch._dynamo" in sys.modules, transformers.__file__ is None)
""")
    assert printed.splitlines() == ["[]", "True True False"]


def test_a_diffusers_that_is_laid_out_differently_is_imported_in_full():
    printed = python("""
import sys
from raysim.generation import lean_unet
lean_unet.PARTS = ("diffusers.models.unets", "diffusers.models.attention", "torch._dynamo")
print(lean_unet.unet_class().__name__, "torch._dynamo" in sys.modules)
""")
    assert printed.split() == ["UNet2DModel", "True"]


def test_a_diffusers_that_has_moved_the_network_is_asked_by_its_public_name():
    printed = python("""
import sys
from raysim.generation import lean_unet
lean_unet._MODULE = "diffusers.models.elsewhere"
print(lean_unet.unet_class().__name__)
""")
    assert printed.split() == ["UNet2DModel"]
