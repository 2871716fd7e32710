"""The data that every worker needs before anything else: the configured plug-ins, the images and their partition."""

import sys
from dataclasses import dataclass, replace

from raysim.core.records import Dataset, Partition
from raysim.engine.messages import WorkerSetup
from raysim.engine.object_store import put, put_shared
from raysim.engine.pool import Pool


@dataclass
class WorkerData:
    """Puts data set and partition into the object store and configures the workers of a pool, once.

    dataset: after `give`, a view of the images in the object store, which takes no memory of its own.
    """

    setup: WorkerSetup
    dataset: Dataset
    partition: Partition
    _given: Pool | None = None
    _shared: tuple[object, object] | None = None

    def give(self, pool: Pool) -> None:
        """Share the images and configure the workers of a pool, unless that was done before for this pool."""
        if pool is self._given:
            return
        dataset_ref, self.dataset = put_shared(self.dataset)
        self._shared = dataset_ref, put(self.partition)
        self._configure(pool)

    def train_at_once(self, pool: Pool) -> None:
        """Have all workers, those to come too, train several clients at once by `local.batched.on_gpu`."""
        self.setup = replace(self.setup, batch_trainer="vmap")
        self._configure(pool)

    def _configure(self, pool: Pool) -> None:
        assert self._shared is not None
        pool.configure(self.setup, *self._shared, list(sys.path))
        self._given = pool
