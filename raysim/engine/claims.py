"""Which clients a worker has begun and which it gives back, so that no client is trained twice or not at all."""

import threading
from collections.abc import Sequence


class Claims:
    """Written to by two threads of a worker: the one that trains, and the one that answers `give_back` meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: set[tuple[int, int]] = set()
        self._given_back: set[tuple[int, int]] = set()

    def begin(self, round_: int, clients: Sequence[int]) -> list[bool]:
        """For each client that is about to be trained: whether to do so; not if it was given back since it came.

        A client that was given back and comes again, because another worker died, is trained.
        """
        with self._lock:
            self._begun = {key for key in self._begun if key[0] == round_}
            self._given_back = {key for key in self._given_back if key[0] >= round_}
            wanted = [(round_, k) not in self._given_back for k in clients]
            self._given_back.difference_update((round_, k) for k in clients)
            self._begun.update((round_, k) for k, is_wanted in zip(clients, wanted, strict=True) if is_wanted)
        return wanted

    def give_back(self, round_: int, clients: Sequence[int]) -> list[bool]:
        """For each client: whether it is given back; not if it was begun."""
        with self._lock:
            free = [(round_, k) not in self._begun for k in clients]
            self._given_back.update((round_, k) for k, is_free in zip(clients, free, strict=True) if is_free)
        return free
