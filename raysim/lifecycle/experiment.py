"""`Experiment`: configuration, data, plug-ins, identity and placement of a run, all before any worker starts."""

from dataclasses import dataclass

from raysim.config.schema import Config
from raysim.engine.placement import Placement
from raysim.engine.session import placement_before_start
from raysim.engine.versions import installed
from raysim.evaluation.task import CLASSIFICATION, Task
from raysim.lifecycle.build import Components, build_components
from raysim.lifecycle.identity import Identity, code_digests
from raysim.lifecycle.inputs import Inputs
from raysim.lifecycle.mirror import check_mirror
from raysim.lifecycle.prepare import Prepared
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
        cls, config: Config, name: str, inputs: Inputs | None = None, task: Task = CLASSIFICATION
    ) -> "Experiment":
        """Read the data, partition them, build the plug-ins.  Raises UserError for what cannot work.

        inputs: of runs before it, which are not read again.
        """
        inputs = inputs or Inputs()
        check_uri(config.tracking.uri)
        check_mirror(config.output.mirror, config.output.dir)
        placement = placement_before_start(config.resources)
        prepared = inputs.prepare(config)
        components = build_components(config, prepared, task)
        identity = _identify(config, prepared, components, placement, inputs.digest(config))
        return cls(config, name, prepared, components, identity, placement)


def _identify(
    config: Config, prepared: Prepared, components: Components, placement: Placement | None, data: dict[str, str]
) -> Identity:
    """The identity of a run: digests of all that it reads.  data: those of the data set."""
    return Identity(
        config=config.hash(),
        partition=prepared.partition.sha256(),
        data=data,
        generator=components.generator_fingerprint,
        model=components.model.fixed_sha256(),
        code=code_digests(config),
        versions=installed(),
        device=placement.device if placement else "",
    )
