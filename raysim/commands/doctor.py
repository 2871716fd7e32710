"""What this machine or cluster has, what would run where, and what is wrong, in one screen."""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from raysim.config.load import load_config
from raysim.config.schema import Config, Resources
from raysim.core.errors import UserError
from raysim.core.persistent import persistent_path
from raysim.core.secrets import without_secrets
from raysim.engine.inventory import Inventory, Machine, take_inventory
from raysim.engine.placement import capacity, place
from raysim.lifecycle.build import build_components
from raysim.lifecycle.mirror import check_mirror
from raysim.lifecycle.prepare import prepare
from raysim.tracking.store import check_uri

LEAST_SHM_BYTES = 1_000_000_000
TOKEN = Path("~/.ray/auth_token")
FULL_DISK = 0.95  # Ray takes no more objects on a disk that is fuller


@dataclass
class Report:
    """The report of `raysim doctor`.

    rows: what was found, as (label, text).  wrong: messages about what would stop or slow down a run.  notes: messages
    about what a run goes on without, and those with which it would begin.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text, with secrets masked."""
        rows = [*self.rows, *(("Note", text) for text in self.notes)]
        rows += [("Wrong", text) for text in self.wrong or ["nothing"]]
        before = ["", *(label for label, _ in rows)]
        pairs = zip(before, rows, strict=False)
        return [f"{label if label != above else '':<9}{without_secrets(text)}" for above, (label, text) in pairs]


def examine(
    source: str | Path | None = None, overrides: Iterable[str] = (), say: Callable[[str], object] = lambda _: None
) -> Report:
    """Examine the machine or the cluster, and a configuration if one is given; nothing is trained.

    source: a configuration file.  overrides: dotted keys; without a configuration, those of `resources` and `tracking`.
    say: told of code that the file names, before it runs.
    Problems are reported, not raised.
    """
    report = Report()
    config = _configuration(report, source, overrides, say)
    resources = config.resources if config else Resources()
    uri = config.tracking.uri if config else "auto"
    try:
        inventory = take_inventory(resources)
    except UserError as error:
        report.wrong.append(str(error))
    else:
        report.rows.append(("Ray", inventory.where))
        _machines(report, inventory)
        _versions(report, inventory.machines)
        _workers(report, inventory, resources)
    _store(report, uri)
    _folders(report, config)
    if config is not None and source is not None:
        _fit(report, config, str(source))
    return report


def _configuration(
    report: Report, source: str | Path | None, overrides: Iterable[str], say: Callable[[str], object]
) -> Config | None:
    example = {"rounds": 1, "data": {"name": "digits"}}
    try:
        return load_config(source if source is not None else example, overrides, say=say)
    except UserError as error:
        report.wrong.append(str(error))
        return None


def _machines(report: Report, inventory: Inventory) -> None:
    for m in inventory.machines:
        name = m.node.name if not m.host or m.host == m.node.name else f"{m.node.name} ({m.host})"
        if m.problem:
            report.wrong.append(f"{name}: {m.problem}")
            continue
        gpus = ", ".join(f"{n} x {kind}" for kind, n in Counter(m.gpus).items())
        store = f", object store {_gb(m.store_bytes)}" if m.store_bytes else ""
        text = (
            f"{name}: {m.node.cpus} CPU, {m.node.gpus} GPU{f' ({gpus})' if gpus else ''}, {_gb(m.memory_bytes)} memory"
            f"{store}, /dev/shm {_gb(m.shm_free_bytes)} free, disk {_gb(m.disk_free_bytes)} free"
        )
        report.rows.append(("Nodes", text))
        if m.shm_free_bytes < LEAST_SHM_BYTES:
            shm = f"{name}: /dev/shm has {_gb(m.shm_free_bytes)} free; below 1 GB, shared arrays go to the slow disk"
            report.wrong.append(f"{shm} (in a container: --shm-size=8g)")
        if m.disk_free_bytes < (1 - FULL_DISK) * m.disk_bytes:
            report.wrong.append(f"{name}: the disk of /tmp is more than 95 % full, and Ray takes no more objects there")
    coming = [*Counter(f"{n.name}: {n.cpus} CPU, {n.gpus} GPU" for n in inventory.to_come).items()]
    report.rows += [("Nodes", f"{count} x {what}") for what, count in coming]
    if inventory.unknown:
        report.rows.append(("Nodes", f"{inventory.unknown} more in the cluster file, not joined yet"))


def _versions(report: Report, machines: list[Machine]) -> None:
    looked_at = [m for m in machines if not m.problem]
    if not looked_at:
        return
    expected = dict(looked_at[0].versions)
    report.rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in expected.items())))
    for m in looked_at[1:]:
        differ = [f"{name} {version}" for name, version in m.versions if expected[name] != version]
        if differ:
            first = looked_at[0].node.name
            report.wrong.append(f"{m.node.name} has {', '.join(differ)}, unlike {first}: install the same everywhere")


def _workers(report: Report, inventory: Inventory, resources: Resources) -> None:
    nodes = [*(m.node for m in inventory.machines), *inventory.to_come]
    try:
        here = not resources.address and len(inventory.machines) == 1 and not inventory.machines[0].store_bytes
        threads = resources.threads_per_worker
        placement = place(nodes, resources.workers, resources.gpus_per_worker, more_than_cores=here, threads=threads)
    except UserError as error:
        if inventory.unknown:
            others = f"the {inventory.unknown} other nodes"
            report.rows.append(("Workers", f"not known before {others} have joined: {error}"))
        else:
            report.wrong.append(str(error))
        return
    room = Counter({n.name: 0 for n in nodes})
    for node in nodes:
        room[node.name] += capacity(node, placement.gpus_per_worker, resources.threads_per_worker)
    where = ", ".join(f"{name} {count}" for name, count in room.items() if count)
    report.rows.append(("Workers", f"{placement}; room: {where}"))


def _store(report: Report, uri: str) -> None:
    """Report where the MLflow store is, and whether it can be written to or answers."""
    try:
        address = check_uri(uri)
    except UserError as error:
        report.wrong.append(str(error))
        return
    report.rows.append(("MLflow", address))
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except OSError as error:
            report.wrong.append(f"tracking.uri = {address}: no MLflow server answers there ({error})")
    elif address.startswith("sqlite:///"):
        path = Path(address.removeprefix("sqlite:///"))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            report.wrong.append(f"tracking.uri = {address}: {path} cannot be written")


def _folders(report: Report, config: Config | None) -> None:
    """Report folders that cannot be written, and a token for clusters that other users of this machine can read."""
    if config is not None:
        refusal = _refusal(persistent_path(config.output.dir))
        if refusal:
            report.wrong.append(f"output.dir = {config.output.dir}: {refusal}; name a folder that you may write to")
    if config is not None and config.output.cache is not None:
        refusal = _refusal(Path(config.output.cache).expanduser())
        if refusal:
            cost = "a run goes on without the cache and makes its images anew; name another folder, or null"
            report.notes.append(f"output.cache = {config.output.cache}: {refusal}; {cost}")
    if config is not None and config.output.mirror is not None:
        try:
            check_mirror(config.output.mirror, config.output.dir)
            report.rows.append(("Mirror", config.output.mirror))
        except UserError as error:
            report.wrong.append(str(error))
    refusal = _refusal(Path("/tmp"))
    if refusal:
        report.wrong.append(f"{refusal}, and Ray of a run on this machine keeps its files in /tmp")
    token = TOKEN.expanduser()
    if token.is_file() and token.stat().st_mode & 0o044 and all(p.stat().st_mode & 0o011 for p in token.parents[:2]):
        whose = f"{token}, the key to your clusters"
        report.wrong.append(f"other users of this machine can read {whose}: chmod 600 {token}")


def _refusal(folder: Path) -> str:
    """Why nothing can be written to a folder that may still have to be made; "" if it can."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"you may not write to {there}"


def _fit(report: Report, config: Config, name: str) -> None:
    """Report whether the data can be read and all plug-ins accept it, which a run would check before Ray starts."""
    try:
        prepared = prepare(config)
        components = build_components(config, prepared)
    except UserError as error:
        report.wrong.append(str(error))
        return
    report.notes += [*config.notes, *prepared.notes, *components.notes]
    images = len(prepared.dataset.train_labels_N)
    size = prepared.dataset.nbytes
    report.rows.append((
        "Config",
        f"{name}: {images:,} training images ({_gb(size)} in all), {prepared.partition.clients:,} clients, "
        f"{prepared.images:,} synthetic images, {config.rounds:,} rounds",
    ))


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
