"""What a machine has that matters to a run, here or on every node of a cluster."""

import os
import shutil
import socket
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config.schema import Resources
from raysim.core.host import physical_bytes, shared_memory_free_bytes
from raysim.core.plain import PlainMapping
from raysim.engine.calls import Ref
from raysim.engine.cluster import alive_nodes, survey
from raysim.engine.placement import Node, local_node
from raysim.engine.session import Session
from raysim.engine.versions import installed

ANSWER_S = 60.0


@dataclass(frozen=True)
class Machine:
    """What one node has.

    store_bytes: size of its object store; 0 where no Ray runs yet.  problem: why the node could not be examined.
    """

    node: Node
    host: str = ""
    gpus: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0
    shm_free_bytes: int = 0
    disk_free_bytes: int = 0
    disk_bytes: int = 1
    store_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Inventory:
    """All machines that a run may use.

    where: which Ray it is.  machines: all nodes.  to_come: nodes that the cluster file allows and that have not joined
    yet.  unknown: how many more may join whose size is unknown.
    """

    where: str
    machines: list[Machine]
    to_come: list[Node]
    unknown: int = 0


def take_inventory(resources: Resources) -> Inventory:
    """Examine this machine, or, where an address is given, every node of that cluster.

    Raises UserError where the cluster does not answer.
    """
    if not (resources.address or os.environ.get("RAY_ADDRESS") or ray.is_initialized()):
        return Inventory("none runs; one is started for each run, on this machine", [_look(local_node(), 0)], [])
    with Session(resources) as session:
        alive = alive_nodes()
        cluster = survey(alive)
        asked = [(node, _ask(node, about)) for node, about in zip(cluster.nodes, alive, strict=True)]
        return Inventory(session.where, [_answer(*a) for a in asked], cluster.to_come, cluster.unknown)


def _ask(node: Node, about: PlainMapping) -> Ref:
    strategy = NodeAffinitySchedulingStrategy(about["NodeID"], soft=False)
    look = ray.remote(_look).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    answer: Ref = look.remote(node, int(about["Resources"].get("object_store_memory", 0)))
    return answer


def _answer(node: Node, asked: Ref) -> Machine:
    try:
        machine: Machine = ray.get(asked, timeout=ANSWER_S)
        return machine
    except GetTimeoutError:
        return Machine(node, problem=f"no answer within {ANSWER_S:g} s")
    except RayError as error:
        return Machine(node, problem=str(error).strip().splitlines()[-1])


def _look(node: Node, store: int) -> Machine:
    """Examine the machine on which this runs."""
    import torch

    disk = shutil.disk_usage("/tmp")
    return Machine(
        node, socket.gethostname(), tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        tuple(installed().items()), physical_bytes(),
        shared_memory_free_bytes() or 0, disk.free, disk.total, store,
    )
