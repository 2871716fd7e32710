"""What every worker needs before anything else: the configured plug-ins, the images, who owns which of them."""

from dataclasses import dataclass

from raysim.core.records import Dataset, Partition
from raysim.engine.messages import WorkerSetup
from raysim.engine.object_store import put, put_shared
from raysim.engine.pool import Pool


@dataclass
class WorkerData:
    """Puts data set and partition into the object store and configures the workers of a pool, once.

    dataset: from then on, a view of the images in the object store, which takes no memory of its own.
    """

    setup: WorkerSetup
    dataset: Dataset
    partition: Partition
    _given: Pool | None = None

    def give(self, pool: Pool) -> None:
        """Share the images and configure the workers, unless this pool has been served."""
        if pool is self._given:
            return
        split_ref, self.dataset = put_shared(self.dataset)
        pool.configure(self.setup, split_ref, put(self.partition))
        self._given = pool
