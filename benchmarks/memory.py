"""Peak memory of a command and everything it starts: PSS, in which a page that n processes share counts 1/n in each.

    python benchmarks/memory.py [--interval 0.5] [--json memory.json] COMMAND ...

Prints the peak of the sum over all processes, and who had how much at that moment. Memory that Ray's object store
shares counts once. Linux only.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import psutil

MB = 1e6


def snapshot(pid: int) -> dict[str, tuple[int, int]]:
    """(PSS, RSS) in bytes of a process and its descendants, summed by what they are.

    Empty where one of them has ended meanwhile: what it shared would count in full for those that are read after it.
    """
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            name = "driver" if process == root else role(process.cmdline())
            memory = process.memory_full_info()
            found[name] = found[name][0] + memory.pss, found[name][1] + memory.rss
    except psutil.Error:
        return {}
    return dict(found)


def role(command: list[str]) -> str:
    """What a process is, from its command line: a script, a Ray worker by its title, or a program."""
    words = [word for word in " ".join(command).split() if not word.startswith("-")]
    if not words:
        return "other"
    scripts = [word for word in words if word.endswith(".py")]
    name = Path(scripts[0] if scripts and "python" in words[0] else words[0]).name
    return "ray::Worker" if name.startswith("ray::Worker") else name


class Watch:
    """A context manager that samples a process tree.

    peak: who had how much PSS when the sum was largest.  pss, rss: the most that each kind of process ever had.
    """

    def __init__(self, pid: int, interval_s: float = 0.5) -> None:
        self.pid, self.interval_s = pid, interval_s
        self.peak: dict[str, int] = {}
        self.pss: dict[str, int] = {}
        self.rss: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def _sample(self) -> None:
        while True:
            seen = snapshot(self.pid)
            now = {name: pss for name, (pss, _) in seen.items()}
            for name, (pss, rss) in seen.items():
                self.pss[name] = max(pss, self.pss.get(name, 0))
                self.rss[name] = max(rss, self.rss.get(name, 0))
            if sum(now.values()) > self.peak_bytes:
                self.peak = now
            if self._stop.wait(self.interval_s):
                return

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def main() -> int:
    """Run the command, print its peak, exit as it did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between samples")
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    process = subprocess.Popen(options.command)
    with Watch(process.pid, options.interval) as watch:
        status = process.wait()
    for name, size in sorted(watch.peak.items(), key=lambda item: -item[1]):
        print(f"{name:32}{size / MB:10,.0f} MB")
    print(f"{'peak PSS of all processes':32}{watch.peak_bytes / MB:10,.0f} MB")
    if options.json:
        Path(options.json).write_text(json.dumps({"peak_bytes": watch.peak_bytes, "by_process": watch.peak}) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
