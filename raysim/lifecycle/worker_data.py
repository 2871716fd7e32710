"""What every worker needs before anything else: the configured plug-ins, the images, who owns which of them."""

from dataclasses import dataclass

from raysim.core.records import Dataset, Partition
from raysim.engine.messages import WorkerSetup
from raysim.engine.object_store import put, put_shared
from raysim.engine.pool import Pool


@dataclass
class WorkerData:
    """Gives it to the workers of a pool, once.  dataset: from then on, a view of what all share, without own memory."""

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
