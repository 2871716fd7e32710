"""CPU seconds of a benchmark's processes and of the whole machine, which say how far its times can be trusted."""

import psutil


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and of all that it has started and that still run."""
    driver = psutil.Process(pid)
    return sum(_own_s(process) for process in [driver, *driver.children(recursive=True)])


def busy_s() -> float:
    """Seconds that the machine's processors have worked so far, for anybody."""
    times = psutil.cpu_times()
    return times.user + times.system + times.nice


def _own_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended meanwhile
        return 0.0
    return times.user + times.system
