"""How busy the machine and the processes of a run are, as metrics of MLflow's page for those."""

import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

SAMPLE_S = 10.0
_MB = 1e6


class SystemSamples:
    """Measures the machine, the driver and its workers on this machine, and its GPUs, from time to time.

    A sample takes some milliseconds, most of them to look through the processes.  driver: its process; 0: nothing is
    measured.
    """

    def __init__(self, driver: int = 0) -> None:
        self._driver = driver
        self._last_s = -SAMPLE_S
        self._used_s: dict[str, float] = {}
        self._gpus: Any = None  # MLflow's own reader of NVIDIA's library, where that is there

    def due(self) -> bool:
        """Whether it is time for a sample."""
        return self._driver != 0 and time.monotonic() - self._last_s >= SAMPLE_S

    def take(self) -> dict[str, float]:
        """The sample, by name; the use of processors since the sample before, of everything else at this moment."""
        import psutil

        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        memory = psutil.virtual_memory()
        found = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_percentage": memory.percent,
            "system/system_memory_usage_megabytes": (memory.total - memory.available) / _MB,
        }
        for group, processes in self._processes().items():
            used_s, own_bytes = _use(processes)
            if group in self._used_s:
                found[f"system/{group}/cpu_cores"] = max(0.0, used_s - self._used_s[group]) / elapsed_s
            self._used_s[group] = used_s
            found[f"system/{group}/memory_megabytes"] = own_bytes / _MB
        return found | self._gpu()

    def _processes(self) -> "dict[str, list[psutil.Process]]":
        """The driver, and the workers among its descendants, by the titles that Ray gives them."""
        import psutil

        with contextlib.suppress(psutil.Error):
            driver = psutil.Process(self._driver)
            return {"driver": [driver], "workers": [p for p in driver.children(recursive=True) if _is_worker(p)]}
        return {}

    def _gpu(self) -> dict[str, float]:
        if self._gpus is None:
            from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

            try:
                self._gpus = GPUMonitor()  # type: ignore[no-untyped-call]
            except Exception:  # noqa: BLE001 - whatever NVIDIA's library says, there is no GPU to measure
                self._gpus = False
        if not self._gpus:
            return {}
        self._gpus.collect_metrics()
        found = {f"system/{name}": float(value) for name, value in self._gpus.aggregate_metrics().items()}
        self._gpus.clear_metrics()
        return found


def _is_worker(process: "psutil.Process") -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1]).startswith("ray::")
    return False


def _use(processes: "list[psutil.Process]") -> tuple[float, float]:
    """(seconds of processor so far, bytes of memory that they do not share) of some processes together."""
    import psutil

    used_s = own_bytes = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            times, memory = process.cpu_times(), process.memory_info()
            used_s += times.user + times.system
            own_bytes += memory.rss - getattr(memory, "shared", 0)
    return used_s, own_bytes
