"""The nodes of the cluster that this process has joined: those that are there, and those that may still come."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import yaml

from raysim.config.schema import Resources
from raysim.core.errors import UserError
from raysim.core.plain import PlainDict, PlainMapping
from raysim.engine.placement import Node, Placement, place
from raysim.engine.starting import autoscaler_state

DECLARATION = Path("~/ray_bootstrap_config.yaml")  # left on the head by `ray up`


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster.

    nodes: those that are alive.  to_come: further ones that the cluster file allows.  unknown: how many more may come
    whose size is unknown.
    """

    nodes: list[Node]
    to_come: list[Node]
    unknown: int = 0


def survey(alive: Sequence[PlainMapping] | None = None) -> Cluster:
    """Look at the cluster as it is now.  alive: its nodes, where `alive_nodes` has been called before."""
    alive = alive_nodes() if alive is None else alive
    nodes = [_node(n["NodeManagerAddress"], n["Resources"]) for n in alive]
    head = [n for n in alive if "node:__internal_head__" in n["Resources"]]
    here = ray.get_runtime_context().get_node_id()
    if not head or head[0]["NodeID"] != here:
        return Cluster(nodes, [])
    workers = [_node("", n["Resources"]) for n in alive if n not in head]
    return Cluster(nodes, *_declared(workers, DECLARATION.expanduser()))


def alive_nodes() -> list[PlainDict]:
    """Ray's description of each node that is alive: NodeID, NodeManagerAddress, Resources and more."""
    return [n for n in ray.nodes() if n["Alive"]]


def _node(name: str, resources: PlainMapping) -> Node:
    return Node(name, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))


def _declared(workers: list[Node], file: Path) -> tuple[list[Node], int]:
    """(nodes that may still come, how many of unknown size) by the file that `ray up` leaves on the head."""
    try:
        plain = yaml.safe_load(file.read_text(encoding="utf-8"))
        kinds = plain["available_node_types"]
        head = plain["head_node_type"]
        most = int(plain["max_workers"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return [], 0  # not a cluster of `ray up`, or not one that grows
    left = most - len(workers)
    there = list(workers)
    to_come: list[Node] = []
    unknown = 0
    for name, kind in kinds.items():
        count = int(kind.get("max_workers", most)) if name != head or plain["provider"]["type"] == "local" else 0
        node = _node("", kind.get("resources") or {})
        if not (node.cpus or node.gpus):
            unknown += count
            continue
        for _ in range(count):
            if node in there:
                there.remove(node)
            else:
                to_come.append(Node(f"{name}, to come", node.cpus, node.gpus))
    return to_come[: max(0, left)], min(unknown, max(0, left))


def place_on_cluster(resources: Resources, say: Callable[[str], None]) -> Placement:
    """Place the workers that the cluster has, or will have, room for; UserError with the numbers if they never fit.

    say: told when nodes are waited for.

    Where the nodes that are still to come have unknown sizes (`provider: local`), the first one with room for a worker
    is waited for, at most resources.cluster_timeout_s.
    """
    limit_s = resources.cluster_timeout_s
    since = time.strftime("%H:%M:%S")
    give_up_at = time.monotonic() + limit_s
    said = False
    while True:
        cluster = survey()
        try:
            return _place(cluster, resources)
        except UserError as error:
            if not cluster.unknown:
                raise
            if time.monotonic() > give_up_at:
                raise UserError(
                    f"no node with room for a worker joined within {limit_s:g} s, since {since} "
                    f"(resources.cluster_timeout_s): {error}; {autoscaler_state()}; see `ray status` and the file "
                    "monitor.log of Ray on the head for why"
                ) from error
        if not said:
            say(
                f"waiting since {since}, up to {limit_s:g} s (resources.cluster_timeout_s), for the first of "
                f"{cluster.unknown} nodes that are still to join; {autoscaler_state()}"
            )
            said = True
        time.sleep(1.0)


def _place(cluster: Cluster, resources: Resources) -> Placement:
    everything = [*cluster.nodes, *cluster.to_come]
    if not cluster.unknown or resources.workers == "auto":
        return place(everything, resources.workers, resources.gpus_per_worker, threads=resources.threads_per_worker)
    fit = place(everything, "auto", resources.gpus_per_worker, threads=resources.threads_per_worker)  # more may follow
    return Placement(resources.workers, fit.gpus_per_worker)


def room(resources: Resources, fraction: float) -> Callable[[], int]:
    """Return a function that computes how many workers there should be now: as many as fit, at most `workers`.

    fraction: of a GPU, for each worker.
    """

    def now() -> int:
        cluster = survey()
        most = resources.workers
        try:
            everything = [*cluster.nodes, *cluster.to_come]
            fit = place(everything, "auto", fraction, threads=resources.threads_per_worker).workers
        except UserError:
            fit = 1
        if most == "auto":
            return fit
        return most if cluster.unknown else min(fit, most)

    return now
