"""What plug-ins may import of raysim: its protocols, bases, records, errors and helpers, under names that stay.

    from raysim.plugins_api import AggregationRule, Dataset, UserError, sgd

`raysim.config.protocols` says for each kind of plug-in what it takes and gives.  Importing this module loads neither
torch nor Ray; the two names that need torch are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

from raysim.aggregation.common import normalise
from raysim.config.markers import AtMost, MayChange, NotWith, OnlyWith, ReplacedBy
from raysim.config.protocols import (
    AggregationRule,
    AllocationPolicy,
    DataSource,
    ImageGenerator,
    LocalAlgorithm,
    ModelFactory,
    Modifier,
    Partitioner,
    ServerOptimiser,
    Updates,
)
from raysim.core.errors import RunError, UserError
from raysim.core.records import (
    Allocation,
    BoolArray,
    ByteArray,
    Dataset,
    Float32Array,
    FloatArray,
    IntArray,
    Partition,
    RoundTable,
    Weights,
)
from raysim.core.rng import stream
from raysim.data.arrays import dataset_from_arrays
from raysim.data.assigning import from_indices, from_owners
from raysim.data.reader import Reader
from raysim.local.sgd import sgd

if TYPE_CHECKING:
    from raysim.local.contract import Job
    from raysim.models.architectures import Classifier

__all__ = [
    "AggregationRule",
    "Allocation",
    "AllocationPolicy",
    "AtMost",
    "BoolArray",
    "ByteArray",
    "Classifier",
    "DataSource",
    "Dataset",
    "Float32Array",
    "FloatArray",
    "ImageGenerator",
    "IntArray",
    "Job",
    "LocalAlgorithm",
    "MayChange",
    "ModelFactory",
    "Modifier",
    "NotWith",
    "OnlyWith",
    "Partition",
    "Partitioner",
    "Reader",
    "ReplacedBy",
    "RoundTable",
    "RunError",
    "ServerOptimiser",
    "Updates",
    "UserError",
    "Weights",
    "dataset_from_arrays",
    "from_indices",
    "from_owners",
    "normalise",
    "sgd",
    "stream",
]

_WITH_TORCH = {"Job": "raysim.local.contract", "Classifier": "raysim.models.architectures"}


def __getattr__(name: str) -> object:
    """Import a name that needs torch when it is first used."""
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'raysim.plugins_api' has no attribute {name!r}; it has {', '.join(__all__)}")
