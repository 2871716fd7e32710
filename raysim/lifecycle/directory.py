"""The files of a run: configuration, partition, metrics, checkpoints, model, summary."""

import contextlib
import hashlib
import io
import json
import re
import shutil
import time
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from raysim.config.schema import Config
from raysim.core.errors import DiskError, UserError
from raysim.core.files import write_file
from raysim.core.persistent import persistent_path
from raysim.core.plain import PlainDict
from raysim.core.records import BatchingChoice, IntArray, Partition
from raysim.core.secrets import plain_without_secrets

if TYPE_CHECKING:
    import pandas as pd

IDENTITY = "run.json"
METRICS = "metrics.parquet"
MODEL = "model.safetensors"
PER_CLIENT = "per_client.csv"
_MODEL_FOLDER = ".mlflow_model"
SUMMARY = "summary.json"
_DAMAGED = (  # what reading a damaged file raises: text, JSON, tables, arrays
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error,
)
_IDENTITY_KINDS: dict[str, type] = {
    "config_hash": str, "partition_sha256": str, "data": dict, "generator": str, "code": dict, "versions": dict,
    "device": str, "name": str, "mlflow_run_id": str, "accepted_changes": list, "result_keys": dict,
    "client_batching": dict,
}


def folder_name(name: str) -> str:
    """The name of a configuration as the beginning of a folder's: of at most 150 bytes, with few signs."""
    return re.sub(r"[^\w.,+=@() -]", "_", name).encode()[:150].decode(errors="ignore")


@contextlib.contextmanager
def readable(path: Path, remedy: str = "") -> Iterator[None]:
    """A context in which errors from a file that is damaged, or was changed by hand, become a UserError.

    remedy: what helps.
    """
    try:
        yield
    except _DAMAGED as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else "is damaged or was changed"
        told = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise UserError(f"{path} {what}: {told}{f'; {remedy}' if remedy else ''}") from error


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run.  Its `write_...` methods raise DiskError where the disk refuses a file."""

    path: Path

    @classmethod
    def create(cls, config: Config, name: str) -> "RunDirectory":
        """Make a new folder in `output.dir`, named after the configuration and the time.

        Raises UserError where no folder can be made there, and DiskError where config.yaml cannot be written; then no
        folder is left.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = persistent_path(config.output.dir) / f"{folder_name(name)}-{stamp}-{uuid.uuid4().hex[:4]}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"output.dir = {config.output.dir}: cannot make a folder in {path.parent} ({error.strerror}); name a "
                "folder that you may write to, or free space there"
            ) from error
        directory = cls(path)
        try:
            directory.write("config.yaml", yaml.safe_dump(config.without_secrets(), sort_keys=False).encode())
        except DiskError:
            directory.remove()
            raise
        return directory

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def figures(self) -> Path:
        """The folder of the figures."""
        return self.path / "figures"

    @property
    def model_folder(self) -> Path:
        """The folder in which the model waits until MLflow has it."""
        return self.path / _MODEL_FOLDER

    def remove_model_folder(self) -> None:
        """Delete that folder, which the run does not need."""
        shutil.rmtree(self.model_folder, ignore_errors=True)

    def remove(self) -> None:
        """Delete the folder of a run that did not begin."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, content: bytes) -> Path:
        """Write a file, complete or not at all; returns its path."""
        path = self.path / name
        write_file(path, content)
        return path

    def write_json(self, name: str, content: PlainDict) -> None:
        """Write a JSON file, complete or not at all, with secrets masked."""
        self.write(name, json.dumps(plain_without_secrets(content), indent=2).encode())

    def write_status(self, status: str, message: str) -> list[str]:
        """Write status.json; returns what went wrong, such as a full disk, which must not hide how the run ended."""
        try:
            self.write_json("status.json", {"status": status, "message": message})
        except DiskError as error:
            return [str(error)]
        return []

    def summary(self) -> PlainDict | None:
        """The content of summary.json of a run that has finished; None for one that has not.

        Raises UserError where it is damaged.
        """
        if not (self.path / SUMMARY).exists():
            return None
        remedy = "without that file, --resume writes it again from the last checkpoint"
        with readable(self.path / SUMMARY, remedy):
            summary = self.read_json(SUMMARY)
            if not isinstance(summary["rounds"], int) or not isinstance(summary["status"], str):
                raise TypeError("its `rounds` is no number, or its `status` no text")
        return summary if summary["status"] == "FINISHED" else None

    def identity(self) -> PlainDict:
        """The content of run.json; UserError where it is damaged."""
        with readable(self.path / IDENTITY, "without its folder, this run can be made again"):
            content = self.read_json(IDENTITY)
            for name, kind in _IDENTITY_KINDS.items():
                if not isinstance(content.get(name, kind()), kind):
                    raise TypeError(f"its `{name}` is {type(content[name]).__name__}, not {kind.__name__}")
            content["config_hash"]
            if "client_batching" in content:
                BatchingChoice(**content["client_batching"])
        return content

    def metrics(self) -> "pd.DataFrame":
        """The metrics of a finished run, one row per round; UserError where metrics.parquet is damaged or missing."""
        import pandas as pd

        remedy = f"without {SUMMARY}, --resume writes both again from the last checkpoint"
        with readable(self.path / METRICS, remedy):
            metrics = pd.read_parquet(self.path / METRICS)
            metrics[["round", "accuracy"]].astype(float)
        return metrics

    def model_problem(self, summary: PlainDict) -> str:
        """What is wrong with model.safetensors; empty where it is what was written, or is not there any more.

        summary: the content of summary.json, which holds its checksum.
        """
        path, expected = self.path / MODEL, summary.get("model_file_sha256")
        if expected is None or not path.is_file():
            return ""
        with readable(path), path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found == expected:
            return ""
        return (
            f"{path} is damaged or was changed: its sha256 is not the one in {SUMMARY}; without these two files, "
            "--resume writes both again from the last checkpoint"
        )

    def read_json(self, name: str) -> PlainDict:
        """Read the object in a JSON file.  Raises OSError, ValueError or TypeError where that fails."""
        content = json.loads((self.path / name).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds no JSON object, but {type(content).__name__}")
        return content

    def write_clients(self, partition: Partition, quota_KC: IntArray, dealt: Partition) -> None:
        """Write partition and quota for `numpy.load`; nothing for a partition that is drawn client by client.

        partition: the real samples that clients train on.  dealt: all that they own.
        """
        if partition.drawn is not None:
            return
        arrays = {
            "indices": partition.indices,
            "offsets": partition.offsets_K1,
            "labels": partition.labels,
            "counts": partition.counts_KC,
            "dealt": dealt.counts_KC,
            "quota": quota_KC,
            "rare": partition.rare_K,
            "noisy": partition.noisy_K,
            "input_noise": partition.input_noise_K,
        }
        packed = io.BytesIO()
        np.savez_compressed(packed, allow_pickle=False, **arrays)
        self.write("partition.npz", packed.getvalue())

    def write_metrics(
        self, metrics: "pd.DataFrame", clients: "pd.DataFrame", per_client: "pd.DataFrame | None" = None
    ) -> None:
        """Write metrics.parquet and metrics.csv (one row per round), clients.parquet (per participant and round).

        per_client: one row per client that took part, for people: per_client.csv.
        """
        self.write(METRICS, metrics.to_parquet(index=False))
        self.write("metrics.csv", metrics.to_csv(index=False).encode())
        self.write("clients.parquet", clients.to_parquet(index=False))
        if per_client is not None:
            self.write(PER_CLIENT, per_client.to_csv(index=False, float_format="%.4f").encode())

    def write_model(self, model: bytes) -> Path:
        """Write model.safetensors; returns its path."""
        return self.write(MODEL, model)


def model_bytes(state: dict[str, NDArray[Any]]) -> bytes:
    """The content of model.safetensors for a model's arrays by name."""
    from safetensors.numpy import save

    return save(state)


def model_sha256(state: dict[str, NDArray[Any]]) -> str:
    """Hex sha256 over names, types, shapes and bytes of a model's arrays."""
    digest = hashlib.sha256()
    for name, array in state.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
