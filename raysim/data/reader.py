"""What a data set may use while it is read: the cache of decoded images, and a list of what there is to say."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysim.core.records import ByteArray, Dataset
from raysim.data.decoded_cache import DecodedCache, content_key, open_cache


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


def open_reader(cache: str | None, notes: list[str]) -> Reader:
    """A reader that keeps decoded images below the folder `cache`; None: nowhere.

    notes: gets what was found damaged, or could not be done, and what the data set says.
    """
    return Reader(None if cache is None else open_cache(cache, notes), notes)


def read_dataset(plugin: Callable[..., Dataset], params: Mapping[str, Any], reader: Reader) -> Dataset:
    """What a data set returns for its keys; one with a positional parameter `reader` is given it."""
    asked = inspect.signature(plugin).parameters.get("reader")
    takes = asked is not None and asked.kind in (asked.POSITIONAL_ONLY, asked.POSITIONAL_OR_KEYWORD)
    return plugin(reader, **params) if takes else plugin(**params)
