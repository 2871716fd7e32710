"""A trained model as a folder that `mlflow.pytorch.load_model` reads: MLmodel, weights, signature, input example.

Written by the driver, which has torch loaded, and not by MLflow's own function, which would load MLflow there.
"""

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from raysim import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXAMPLE = "input_example.json"


def write_model_folder(folder: Path, module: "nn.Module", example: "Tensor", classes: int) -> None:
    """Write the folder of `module`, which maps uint8 images to a number for each class.

    example: a few images, B x channels x height x width, kept as the input example.  Raises OSError for a disk that
    refuses a file, and what `torch.save` raises for a module that cannot be pickled.
    """
    import torch

    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    torch.save(module, data / "model.pth")
    (data / "pickle_module_info.txt").write_text("pickle")
    packages = [f"raysim=={__version__}", f"torch=={torch.__version__}"]
    (folder / "requirements.txt").write_text("\n".join(["mlflow>=3", *packages]) + "\n")
    python = {"python": platform.python_version(), "build_dependencies": ["pip"]}
    (folder / "python_env.yaml").write_text(yaml.safe_dump({**python, "dependencies": ["-r requirements.txt"]}))
    (folder / _EXAMPLE).write_text(json.dumps(example.tolist()))
    described = {
        "artifact_path": "model",
        "flavors": {
            "python_function": {
                "data": "data", "env": {"virtualenv": "python_env.yaml"}, "loader_module": "mlflow.pytorch",
                "model_config": {"device": None}, "pickle_module_name": "pickle",
                "python_version": platform.python_version(),
            },
            "pytorch": {"code": None, "model_data": "data", "pytorch_version": str(torch.__version__)},
        },
        "saved_input_example_info": {
            "artifact_path": _EXAMPLE, "type": "ndarray", "format": "tf-serving", "serving_input_path": None,
        },
        "signature": {
            "inputs": json.dumps([_tensor("uint8", [-1, *example.shape[1:]])]),
            "outputs": json.dumps([_tensor("float32", [-1, classes])]),
        },
    }  # fmt: skip
    (folder / "MLmodel").write_text(yaml.safe_dump(described, sort_keys=False))


def _tensor(dtype: str, shape: list[int]) -> dict[str, object]:
    return {"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}
