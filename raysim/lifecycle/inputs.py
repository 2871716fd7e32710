"""What runs that follow one another have alike: data sets, their digests, and partitions, each read or made once."""

import json
from dataclasses import replace

from raysim.config.schema import Config
from raysim.core.records import Dataset, Partition
from raysim.data.digest import digest
from raysim.lifecycle.prepare import Prepared, load_dataset, make_partition, prepare


class Inputs:
    """The inputs of runs of one process, by what makes them in the configuration.

    notes: messages of all data sets that were loaded, and of the cache of decoded images.
    """

    def __init__(self, given: Dataset | None = None) -> None:
        """Begin with nothing.  given: the data set of all runs, whatever their configurations name."""
        self.notes: list[str] = []
        self._given = given
        self._datasets: dict[str, Dataset] = {}
        self._digests: dict[str, dict[str, str]] = {}
        self._partitions: dict[str, Partition] = {}

    def dataset(self, config: Config) -> Dataset:
        """The data set of a run."""
        if self._given is not None:
            return self._given
        key = self.key(config)
        if key not in self._datasets:
            self._datasets[key] = load_dataset(config, self.notes)
        return self._datasets[key]

    def prepare(self, config: Config) -> Prepared:
        """What `lifecycle.prepare` makes of a run.  Raises UserError for what cannot work."""
        told = len(self.notes)
        dataset = self.dataset(config)
        made_by = [self.key(config), config.partition.model_dump(), config.partition_seed]
        key = json.dumps(made_by, sort_keys=True)
        if key not in self._partitions:
            self._partitions[key] = make_partition(config, dataset)
        prepared = prepare(config, dataset, self._partitions[key])
        return replace(prepared, notes=[*self.notes[told:], *prepared.notes])

    def digest(self, config: Config) -> dict[str, str]:
        """The digests of the data set of a run."""
        key = self.key(config)
        if key not in self._digests:
            self._digests[key] = digest(self.dataset(config))
        return self._digests[key]

    def key(self, config: Config) -> str:
        """What the data set of a run is read by, as a text."""
        return json.dumps(config.data.model_dump(exclude={"augment"}), sort_keys=True)
