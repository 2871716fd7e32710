"""`Experiment`: configuration, data, plug-ins, identity and placement of a run, all before any worker starts."""

from dataclasses import dataclass

from raysim.config.schema import Config
from raysim.core.records import Dataset
from raysim.data.digest import digest
from raysim.engine.placement import Placement
from raysim.engine.session import placement_before_start
from raysim.engine.versions import installed
from raysim.evaluation.task import CLASSIFICATION, Task
from raysim.lifecycle.build import Components, build_components
from raysim.lifecycle.identity import Identity, code_digests
from raysim.lifecycle.mirror import check_mirror
from raysim.lifecycle.prepare import Prepared, prepare
from raysim.tracking.tracker import check_uri


@dataclass(frozen=True)
class Experiment:
    """A configuration with everything that is computed from it before a run.

    name: begins the names of its runs' folders.  placement: the workers; None where a cluster has not answered yet.
    """

    config: Config
    name: str
    prepared: Prepared
    components: Components
    identity: Identity
    placement: Placement | None

    @classmethod
    def prepare(
        cls, config: Config, name: str, dataset: Dataset | None = None, task: Task = CLASSIFICATION
    ) -> "Experiment":
        """Read the data (unless given), partition them, build the plug-ins.  Raises UserError for what cannot work."""
        check_uri(config.tracking.uri)
        check_mirror(config.output.mirror, config.output.dir)
        placement = placement_before_start(config.resources)
        prepared = prepare(config, dataset)
        components = build_components(config, prepared, task)
        return cls(config, name, prepared, components, identify(config, prepared, components, placement), placement)


def identify(
    config: Config,
    prepared: Prepared,
    components: Components,
    placement: Placement | None,
    data: dict[str, str] | None = None,
) -> Identity:
    """The identity of a run: digests of all that it reads.  data: digests of the data set, if they are known."""
    return Identity(
        config=config.hash(),
        partition=prepared.partition.sha256(),
        data=digest(prepared.dataset) if data is None else data,
        generator=components.generator_fingerprint,
        model=components.model.fixed_sha256(),
        code=code_digests(config),
        versions=installed(),
        device=placement.device if placement else "",
    )
