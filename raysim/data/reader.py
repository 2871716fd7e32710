"""What a data set may use while it is read: the cache of decoded images, and a list of what there is to say."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raysim.config.plugin_guard import blaming, checked_dataset
from raysim.config.protocols import DataSource
from raysim.core.plain import PlainMapping
from raysim.core.records import ByteArray, Dataset
from raysim.data.decoded_cache import DecodedCache, content_key, open_cache
from raysim.data.decoding import room_in_memory


@dataclass(frozen=True)
class Reader:
    """Given to a data set that has a positional parameter `reader`.

    cache: of decoded images; None decodes anew.  notes: gets what a user should know about how the data were read.
    """

    cache: DecodedCache | None = None
    notes: list[str] = field(default_factory=list)

    def decoded(self, content: Callable[[], Iterable[bytes]], decode: Callable[[], ByteArray]) -> ByteArray:
        """What `decode` gives, from the cache if it is there.

        content: what determines it, together with the versions of the decoders; digests of files, for example.
        """
        return decode() if self.cache is None else self.cache.images(content_key(content()), decode)

    def room(self, shape: tuple[int, ...]) -> ByteArray:
        """An array to decode images of this shape into: in memory, or on the disk where they would fill the memory."""
        return room_in_memory(shape) if self.cache is None else self.cache.room(shape)


def open_reader(cache: str | None, notes: list[str]) -> Reader:
    """A reader that keeps decoded images below the folder `cache`; None: nowhere.

    notes: gets what was found damaged, or could not be done, and what the data set says.
    """
    return Reader(None if cache is None else open_cache(cache, notes), notes)


def read_dataset(name: str, source: DataSource, params: PlainMapping, reader: Reader) -> Dataset:
    """What a data set returns for its keys; one with a positional parameter `reader` is given it.

    Raises UserError for what a data set of the user's own (`name`, in messages) raises, or returns, if it is no Dataset
    that can be used.
    """
    asked = inspect.signature(source).parameters.get("reader")
    takes = asked is not None and asked.kind in (asked.POSITIONAL_ONLY, asked.POSITIONAL_OR_KEYWORD)
    with blaming({"data.name": name}):
        dataset = source(reader, **params) if takes else source(**params)
    return checked_dataset(dataset, name) if ":" in name else dataset
