"""`raysim pretrain`: from a configuration to a data set and a trained generator, with progress on the terminal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysim.config import apply_overrides, validate
from raysim.display import Display
from raysim.errors import ConfigError
from raysim.generators.pretrain import pretrain as train
from raysim.generators.pretrain_config import PretrainConfig
from raysim.plugins import check_name, check_parameters, resolve
from raysim.records import Split
from raysim.yaml_io import read_yaml


def pretrain(source: str | Path, overrides: Iterable[str] = ()) -> Path:
    """Train the generator of a configuration; returns the folder with its weights."""
    with Display() as display:
        display.line(f"raysim: reading {source}")
        plain = read_yaml(source)
        apply_overrides(plain, overrides)
        config = validate(PretrainConfig, plain, str(source))
        split = _load(config.data)
        display.line(f"{split.name}: {len(split.train_labels_N):,} training images; {config.steps:,} steps")
        display.phase("steps")

        def show(progress: dict[str, Any]) -> None:
            shown = {k: v for k, v in progress.items() if k in ("loss", "images_per_s")}
            display.round(progress["step"], config.steps, shown, progress.get("eta_s"))

        return train(config, split, show)


def _load(section: dict[str, Any]) -> Split:
    name = str(section.get("name"))
    problem = check_name("data", name)
    if problem:
        raise ConfigError([f"data.name: {problem}"])
    given = {key: value for key, value in section.items() if key != "name"}
    params, problems = check_parameters(resolve("data", name), given, "data", also=["name"])
    if problems:
        raise ConfigError(problems)
    split: Split = resolve("data", name)(**params)
    return split
