"""Progress below the cell of a notebook: one line that is updated in place, without widgets."""

import logging
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

EVERY_S = 0.2
_CELLS = 24


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class CellBar:
    """One bar for all that a run does."""

    def __init__(self) -> None:
        self._handle: Any = None  # IPython's, which has no types
        self._shown_s = 0.0
        self._stopped = ""  # what the bar says once nothing goes on, where that is something else

    def show(self, phase: str, done: int, total: int, parts: Sequence[str], left: str) -> None:
        """Show that `done` of `total` are done, unless something was shown a moment ago and this is not the end."""
        now_s = time.monotonic()
        if done < total and now_s - self._shown_s < EVERY_S:
            return
        self._shown_s = now_s
        full = _CELLS * done // max(1, total)
        bar = f"{phase} {'█' * full}{'░' * (_CELLS - full)} {done:,}/{total:,}  "
        self._stopped = f"{bar}{', '.join(parts)}".rstrip() if left else ""
        self._put({"text/plain": f"{bar}{', '.join([*parts, *([left] if left else [])])}".rstrip()})

    def stop(self) -> None:
        """Take away the time left: what the bar shows has ended, or was interrupted."""
        if self._stopped:
            self._put({"text/plain": self._stopped})
            self._stopped = ""

    def _put(self, content: dict[str, str]) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(content, raw=True)


def quieten() -> None:
    """In a notebook, keep libraries from asking for widgets, which nothing here uses."""
    if in_notebook():
        warnings.filterwarnings("ignore", message="IProgress not found")
        logging.getLogger("ray.widgets.util").setLevel(logging.ERROR)
