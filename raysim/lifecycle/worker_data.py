"""The data that every worker needs before anything else: the configured plug-ins, the images and their partition."""

import sys
import weakref
from dataclasses import dataclass, field, replace

from raysim.core.files import cannot_write
from raysim.core.records import Dataset, Partition
from raysim.data.decoded_cache import open_cache
from raysim.data.mapped import MappedDataset
from raysim.engine.calls import Ref
from raysim.engine.messages import WorkerSetup
from raysim.engine.object_store import least_capacity_bytes, put, put_shared
from raysim.engine.pool import Pool


@dataclass
class WorkerData:
    """Gives data set and partition to the workers of a pool, once: through the object store, or through files.

    dataset: after `give`, a view of the images in the object store or in files, which takes no memory of its own.
    cache: the folder of the cache, in which a data set that is too large for the object store gets its files; None: it
    is put there nevertheless, and Ray keeps it on the disk.  notes: what was done instead, and why.
    """

    setup: WorkerSetup
    dataset: Dataset
    partition: Partition
    cache: str | None = None
    notes: list[str] = field(default_factory=list)
    _given: Pool | None = None
    _shared: tuple[object, object] | None = None
    _mapped: MappedDataset | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether the images are in files, and take no room in the object store."""
        return self._mapped is not None

    def give(self, pool: Pool) -> None:
        """Share the images and configure the workers of a pool, unless that was done before for this pool.

        Images that the run before has shared, from the same data set in memory, are not put there again.
        """
        if pool is self._given:
            return
        self._shared = self._share(pool), put(self.partition)
        self._configure(pool)

    def train_at_once(self, pool: Pool) -> None:
        """Have all workers, those to come too, train several clients at once by `local.batched.on_gpu`."""
        self.setup = replace(self.setup, batch_trainer="vmap")
        self._configure(pool)

    def _configure(self, pool: Pool) -> None:
        assert self._shared is not None
        pool.configure(self.setup, *self._shared, list(sys.path))
        self._given = pool

    def _share(self, pool: Pool) -> Ref:
        if pool.shared is not None and pool.shared[0]() is self.dataset:
            reference, self.dataset = pool.shared[1:]
            return reference
        capacity = least_capacity_bytes()
        if self._mapped is None and self.cache is not None and self.dataset.nbytes > capacity:
            self._map(self.cache, capacity)
        if self._mapped is None:
            before = weakref.ref(self.dataset)
            pool.shared = None  # frees the data set of another run before there are two
            reference, self.dataset = put_shared(self.dataset)
            pool.shared = before, reference, self.dataset
            return reference
        self.dataset = self._mapped.open()
        return put(self._mapped)

    def _map(self, root: str, capacity: int) -> None:
        """Have the images in files of the cache."""
        cache = open_cache(root, self.notes)
        if cache is None:
            return
        what = f"the data set takes {self.dataset.nbytes / 1e6:,.0f} MB and an object store {capacity / 1e6:,.0f} MB"
        try:
            files = cache.files(self.dataset)
        except OSError as error:
            self.notes.append(f"{what}, and it cannot be mapped: {cannot_write(cache.folder, error, 'output.cache')}")
            return
        self._mapped = MappedDataset.of(self.dataset, files)
        self.notes.append(f"{what}: its images are mapped from {cache.folder} on every node")
