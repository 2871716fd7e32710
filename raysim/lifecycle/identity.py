"""The identity of a run: digests of all that it reads, and its versions; and what has changed since.

A run whose data, generator or fixed parameters have changed is another run. Changed code or versions may or may not
change a result, so a resume goes on over them only when it is told to (`--accept-changes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysim.config.plugin_source import own_digest, source_digest
from raysim.config.schema import PLUGIN_SECTIONS, Config

_OWN = "raysim"
_DATA_NAMES = {
    "train_images": "training images",
    "train_labels": "training labels",
    "test_images": "test images",
    "test_labels": "test labels",
    "class_names": "class names",
    "public_images": "public images",
    "public_labels": "labels of public images",
    "validation_images": "validation images",
    "validation_labels": "validation labels",
}


@dataclass(frozen=True)
class Identity:
    """Digests of what a run read, as hex strings by name.

    config: of the configuration, without keys that change no result.  partition: of who owns which sample.
    data: of each array of the data set.  generator: its fingerprint; empty where no image is made.
    model: of the model's parameters that are not trained, such as those a plug-in reads from a file; empty without any.
    code: of the source of the user's plug-ins, by module, and of raysim itself.  versions: those of the packages that
    compute.  device: what the workers compute on, such as cpu; empty where that is not known before a cluster answers.
    """

    config: str
    partition: str
    data: Mapping[str, str]
    generator: str
    model: str
    code: Mapping[str, str]
    versions: Mapping[str, str]
    device: str

    def as_json(self) -> dict[str, Any]:
        """The entries of run.json that hold it."""
        return {
            "config_hash": self.config,
            "partition_sha256": self.partition,
            "data": dict(self.data),
            "generator": self.generator,
            "model": self.model,
            "code": dict(self.code),
            "versions": dict(self.versions),
            "device": self.device,
        }

    def changed_inputs(self, before: Mapping[str, Any]) -> list[str]:
        """The data and generator that differ from the content `before` of a run.json, for people."""
        data = before.get("data", {})
        changed = [f"the {_DATA_NAMES.get(name, name)}" for name in sorted(_differing(data, self.data))]
        if before.get("partition_sha256", self.partition) != self.partition and not changed:
            changed.append("the partition")
        if before.get("generator", self.generator) != self.generator:
            changed.append("the generator or its weights")
        if before.get("model", self.model) != self.model:
            changed.append("the parameters of the model that are not trained")
        return changed

    def changed_plugins(self, before: Mapping[str, Any]) -> list[str]:
        """The modules of the user's plug-ins whose code differs from the content `before` of a run.json."""
        return sorted(_differing(before.get("code", {}), self.code) - {_OWN})

    def changed_code(self, before: Mapping[str, Any]) -> list[str]:
        """The code, versions and device that differ from the content `before` of a run.json, for people."""
        versions = before.get("versions", {})
        changed = [f"the code of {name}" for name in sorted(_differing(before.get("code", {}), self.code))]
        for name in sorted(_differing(versions, self.versions)):
            changed.append(f"{name} {versions.get(name, 'absent')} -> {self.versions.get(name, 'absent')}")
        device = before.get("device", "")
        if device and self.device and device != self.device:
            changed.append(f"device {device} -> {self.device}")
        return changed


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def code_digests(config: Config) -> dict[str, str]:
    """Hex sha256 of raysim's own source, and of that of each `module:attribute` plug-in, by module.

    What a plug-in imports of the user's other modules counts, too.
    """
    digests = {_OWN: own_digest()}
    for name in {getattr(config, section).name for section in PLUGIN_SECTIONS}:
        digest = source_digest(name)
        if digest:
            digests[name.partition(":")[0]] = digest
    return digests
