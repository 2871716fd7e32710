"""Which clients a worker has begun and which it gives back, so that no client is trained twice or not at all."""

import threading
from collections.abc import Sequence


class Claims:
    """The clients that a worker has begun, and those that it has given back, in the current round.

    Two threads of the worker call it: the one that trains, and the one that answers `give_back` meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: set[tuple[int, int]] = set()
        self._given_back: set[tuple[int, int]] = set()

    def begin(self, round_: int, clients: Sequence[int]) -> list[bool]:
        """Note that these clients are about to be trained; returns for each whether to train it.

        A client is not trained if it was given back after it was sent here. If it is sent here again after that,
        because another worker died, it is trained.
        """
        with self._lock:
            self._begun = {key for key in self._begun if key[0] == round_}
            self._given_back = {key for key in self._given_back if key[0] >= round_}
            wanted = [(round_, k) not in self._given_back for k in clients]
            self._given_back.difference_update((round_, k) for k in clients)
            self._begun.update((round_, k) for k, is_wanted in zip(clients, wanted, strict=True) if is_wanted)
        return wanted

    def give_back(self, round_: int, clients: Sequence[int]) -> list[bool]:
        """Give back these clients; returns for each whether it is given back, which it is unless it was begun."""
        with self._lock:
            free = [(round_, k) not in self._begun for k in clients]
            self._given_back.update((round_, k) for k, is_free in zip(clients, free, strict=True) if is_free)
        return free
