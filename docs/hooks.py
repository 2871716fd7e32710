"""Writes the pages of the documentation that follow from the code: commands, keys, plug-ins, metrics.

Any: mkdocs and click say of little what it is.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo

from raysim.cli import commands
from raysim.config.load import build
from raysim.config.plugin_help import key_lines
from raysim.config.registry import KINDS, available, resolve
from raysim.config.schema import SECTIONS, Config
from raysim.federation.metrics import COLUMNS, METRICS


def on_files(files: Files, config: Any) -> Files:
    """Add the pages; mkdocs calls this when it has listed the others."""
    pages = {
        "commands": _commands(), "configuration": _configuration(), "plugins": _plugins(), "metrics": _metrics(),
    }
    for name, lines in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines) + "\n"))
    experiments = Path(__file__).parents[1] / "experiments"
    results = (experiments / "RESULTS.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "results.md", content=results))
    papers = (experiments / "papers/README.md").read_text(encoding="utf-8").replace("../RESULTS.md", "../results.md")
    files.append(File.generated(config, "papers/README.md", content=papers))
    rivals = (experiments / "RIVALS.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "rivals.md", content=rivals))
    return files


def _commands() -> Iterator[str]:
    yield "# Commands\n\n`raysim COMMAND`, or `python -m raysim COMMAND`. Exit codes: 0, it finished; 1, it failed;"
    yield "2, the command, the configuration or the data cannot work, nothing was trained; 130, it was interrupted.\n"
    context = click.Context(commands, info_name="raysim")
    for name, command in _flat(commands, "raysim", context):
        yield f"## {name}\n\n```text"
        yield command.get_help(click.Context(command, info_name=name, terminal_width=100))
        yield "```\n"


def _flat(group: click.Group, prefix: str, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _flat(command, f"{prefix} {name}", context)
        elif command is not None:
            yield f"{prefix} {name}", command


def _configuration() -> Iterator[str]:
    """Every key of the schema; those of plug-ins are on the page of the plug-ins."""
    yield "# Configuration\n\nEvery key, with its default. Only `data` and `rounds` are required. The keys of a"
    yield "plug-in, which stand beside its `name`, are under [Plug-ins](plugins.md).\n\n## The run\n"
    example = build({"data": {"name": "digits"}, "rounds": 1}).resolved()
    single = {name: field for name, field in Config.model_fields.items() if name not in SECTIONS}
    yield from _keys("", single, example)
    for section, model in SECTIONS.items():
        about = Config.model_fields[section].description or inspect.cleandoc(model.__doc__ or "")
        yield f"\n## {section}\n\n{about}\n"
        yield from _keys(f"{section}.", model.model_fields, example[section])


def _keys(prefix: str, fields: dict[str, FieldInfo], example: dict[str, Any]) -> Iterator[str]:
    yield "| key | default | |\n|---|---|---|"
    for name, field in fields.items():
        required = f"{prefix}{name}" in ("rounds", "data.name")
        default = "required" if required else f"`{json.dumps(example.get(name))}`"
        yield f"| `{prefix}{name}` | {default} | {_cell(field.description or 'which plug-in')} |"


def _plugins() -> Iterator[str]:
    yield "# Plug-ins\n\nEvery plug-in by section of the configuration: what it computes, its source, its keys.\n"
    for kind in KINDS:
        heading = "partition.MODIFIER" if kind == "modifier" else f"{kind}.name"
        yield f"## {heading} {{ #{heading.lower().replace('.', '')} }}\n"
        for name in sorted(available(kind)):
            first, _, rest = inspect.cleandoc(resolve(kind, name).__doc__ or "").partition("\n")
            yield f"### {name} {{ #{kind}-{name} }}\n\n{_cell(first)}\n"
            if rest.strip():
                yield f"```text\n{rest.strip()}\n```\n"
            yield from (f"- `{key}`: {told}" for key, told in key_lines(kind, name))
            yield ""


def _metrics() -> Iterator[str]:
    yield "# Metrics\n\nOf a round: columns of `metrics.parquet` and `metrics.csv`, and metrics of the MLflow run.\n"
    yield "MLflow has them [in groups](../how-to/mlflow.md#names-of-metrics).\n"
    yield from _table(METRICS)
    yield "\nOf a client in a round: columns of `clients.parquet`.\n"
    yield from _table(COLUMNS)


def _table(described: dict[str, str]) -> Iterator[str]:
    yield "| name | |\n|---|---|"
    yield from (f"| `{_cell(name)}` | {_cell(about)} |" for name, about in described.items())


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")
