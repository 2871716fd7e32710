"""The files of a run: configuration, partition, metrics, checkpoints, model, summary."""

import hashlib
import json
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from raysim.config.schema import Config
from raysim.core.errors import UserError
from raysim.core.files import atomically, write_atomic
from raysim.core.persistent import persistent_path
from raysim.core.plain import PlainDict
from raysim.core.records import IntArray, Partition
from raysim.core.secrets import plain_without_secrets

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run."""

    path: Path

    @classmethod
    def create(cls, config: Config, name: str) -> "RunDirectory":
        """Make a new folder in `output.dir`, named after the configuration and the time; UserError if it cannot be."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = persistent_path(config.output.dir) / f"{name}-{stamp}-{uuid.uuid4().hex[:4]}"
        try:
            (path / "figures").mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"output.dir = {config.output.dir}: cannot make a folder in {path.parent} ({error.strerror}); name a "
                "folder that you may write to"
            ) from error
        write_atomic(path / "config.yaml", yaml.safe_dump(config.without_secrets(), sort_keys=False).encode())
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def figures(self) -> Path:
        """The folder of the figures."""
        return self.path / "figures"

    def write_json(self, name: str, content: PlainDict) -> None:
        """Write a JSON file, complete or not at all, with secrets masked."""
        write_atomic(self.path / name, json.dumps(plain_without_secrets(content), indent=2).encode())

    def write_status(self, status: str, message: str) -> list[str]:
        """Write status.json; returns what went wrong, such as a full disk, which must not hide how the run ended."""
        try:
            self.write_json("status.json", {"status": status, "message": message})
        except OSError as error:
            return [f"status.json could not be written: {error}"]
        return []

    def read_json(self, name: str) -> PlainDict:
        """Read the object in a JSON file.  Raises OSError or ValueError where that fails."""
        content: PlainDict = json.loads((self.path / name).read_text(encoding="utf-8"))
        return content

    def write_clients(self, partition: Partition, quota_KC: IntArray) -> None:
        """Write partition and quota for `numpy.load`; nothing for a partition that is drawn client by client."""
        if partition.drawn is not None:
            return
        arrays = {
            "indices": partition.indices,
            "offsets": partition.offsets_K1,
            "labels": partition.labels,
            "counts": partition.counts_KC,
            "quota": quota_KC,
            "rare": partition.rare_K,
            "noisy": partition.noisy_K,
            "input_noise": partition.input_noise_K,
        }

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)

        atomically(self.path / "partition.npz", write)

    def write_metrics(self, metrics: "pd.DataFrame", clients: "pd.DataFrame") -> None:
        """Write metrics.parquet and metrics.csv (one row per round), clients.parquet (per participant and round)."""
        atomically(self.path / "metrics.parquet", partial(metrics.to_parquet, index=False))
        atomically(self.path / "metrics.csv", partial(metrics.to_csv, index=False))
        atomically(self.path / "clients.parquet", partial(clients.to_parquet, index=False))

    def write_model(self, state: dict[str, NDArray[Any]]) -> tuple[Path, str]:
        """Write model.safetensors; returns (path, hex sha256 over names, types, shapes and bytes of its arrays)."""
        from safetensors.numpy import save

        path = self.path / "model.safetensors"
        write_atomic(path, save(state))
        digest = hashlib.sha256()
        for name, array in state.items():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return path, digest.hexdigest()
