"""Machines to run a cluster on: network, process and mount namespaces of this one, reached over real ssh."""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
RAY = str(Path(sys.executable).parent / "ray")


def obstacle() -> str:
    """Why there can be no such machines here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
    if missing := [tool for tool in ("sshd", "ip", "rsync", "unshare", "uptime") if not shutil.which(tool, path=path)]:
        return f"needs {', '.join(missing)} (Debian: apt-get install openssh-server iproute2 rsync procps)"
    if {"tmp", "run"} & {Path(p).parts[1] for p in (sys.executable, sys.prefix, PROJECT)}:
        return "the interpreter or the project lies in /tmp or /run, which every machine has for itself"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return "" if made.returncode == 0 else f"cannot make namespaces: {made.stderr.strip()}"


def readme_command(beginning: str) -> list[str]:
    """The words of the command in docs/how-to/cluster.md that begins so, as far as a `&&`."""
    found = re.search(re.escape(beginning) + r"[^`\n&]*", (PROJECT / "docs/how-to/cluster.md").read_text())
    assert found, f"the page has no command that begins with {beginning!r}"
    return shlex.split(found[0])


def at(log: Path, *steps: tuple[str, Callable[[], object]]) -> threading.Thread:
    """Watch the growing output of a command, and do what goes with each pattern, in turn, once it is there.

    Lines that were broken to fit a terminal count as one.
    """

    def watch() -> None:
        for pattern, action in steps:
            while not log.exists() or not re.search(pattern, " ".join(log.read_text().split())):
                time.sleep(0.1)
            action()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    return watcher


@dataclass
class Hosts:
    """Some hosts, the first of which is the head, and a cluster file for them made from experiments/cluster/local.yaml.

    folder: everything of theirs.  home: the home directory of the user who sits outside.  walls: (command, seconds).
    """

    folder: Path
    count: int = 3
    walls: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        self.file, self.name = self.folder / "cluster.yaml", f"raysim-test-{self.folder.name}"

    def tool(self, *arguments: str) -> str:
        """Run the `testhosts` script."""
        command = [str(HERE / "testhosts"), *arguments, "--dir", str(self.folder / "hosts")]
        # Its hosts outlive it, so they must not hold the pipe of its output open.
        log = self.folder / "testhosts.out"
        with log.open("w") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=120)
        assert done.returncode == 0, log.read_text()
        return log.read_text()

    def start(self) -> None:
        """Make the hosts run, those that are dead again."""
        said = self.tool("up", str(self.count), "--subnet", f"10.77.{os.getpid() % 256}")  # two such tests at once
        self.head = re.search(r"HEAD_IP=(\S+)", said)[1]  # type: ignore[index]
        self.workers = re.search(r"WORKER_IPS='(.*)'", said)[1].split()  # type: ignore[index]
        if not self.file.exists():
            self._write_cluster_file()

    def _write_cluster_file(self) -> None:
        """local.yaml with the addresses of these hosts, small stores, and nothing to install."""
        cluster: dict[str, Any] = yaml.safe_load((PROJECT / "experiments/cluster/local.yaml").read_text())
        cluster["cluster_name"] = self.name
        cluster["provider"] |= {"head_ip": self.head, "worker_ips": self.workers}
        cluster["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.folder / "hosts" / "id_ed25519")}
        cluster["min_workers"] = cluster["max_workers"] = len(self.workers)
        setup = [c for c in cluster["setup_commands"] if "/bin/uv" not in c]
        cluster["setup_commands"] = [c.replace("$HOME/raysim-venv/bin", f"{sys.prefix}/bin") for c in setup]
        for key, extra in {"head_start_ray_commands": "", "worker_start_ray_commands": " --num-cpus=2"}.items():
            stop, start = cluster[key]
            small = f"ray start --object-store-memory=200000000 --memory=2000000000{extra}"
            # Niceness, or other work on this machine wins.
            cluster[key] = [stop, start.replace("ray start", f"RAY_worker_niceness=0 {small}")]
        self.file.write_text(yaml.safe_dump(cluster, sort_keys=False))

    def _environment(self) -> dict[str, str]:
        """Of a user outside, with a clean home and all of Ray's state in the folder of these hosts."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_")) and k != "PYTHONPATH"}
        return plain | {
            "HOME": str(self.home), "RAY_TMPDIR": str(self.folder / "client"), "TMPDIR": str(self.folder),
            "TERM": "dumb",
        }

    def _words(self, words: list[str]) -> list[str]:
        """A command of docs/how-to/cluster.md, for the cluster file of these hosts."""
        assert words[0] == "ray"
        return [RAY, *(str(self.file) if word == "cluster.yaml" else word for word in words[1:])]

    def ray(
        self, *words: str, timeout_s: float = 600, fails: bool = False, log: Path | None = None, types: str = "",
        address: str = "",
    ) -> str:
        """A `ray` command outside, in the folder of the project; its output, which also grows in `log`.

        words: `cluster.yaml` is that of these hosts.  types: what the user types.  address: of Ray, with the token.
        """
        environment = self._environment()
        if address:
            environment |= {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
        began, log = time.monotonic(), log or self.folder / "ray.log"
        shown = shlex.join(words)
        with log.open("w") as output:
            done = subprocess.run(
                self._words(list(words)), stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s,
                env=environment, cwd=PROJECT, input=types, text=True,
            )
        self.walls.append((shown, time.monotonic() - began))
        said = log.read_text()
        assert (done.returncode != 0) == fails, f"{shown} ended with {done.returncode}:\n{said}"
        return said

    @contextlib.contextmanager
    def tunnel(self, words: list[str], port: int, timeout_s: float = 240) -> Iterator[str]:
        """A `ray` command that forwards a port of this machine; the address, once a page is served there."""
        began, address = time.monotonic(), f"http://127.0.0.1:{port}"
        with (self.folder / "tunnel.log").open("w") as output:
            process = subprocess.Popen(
                self._words(words), stdout=output, stderr=subprocess.STDOUT, env=self._environment(), cwd=PROJECT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )
        try:
            while not _serves(address):
                assert process.poll() is None and time.monotonic() < began + timeout_s, (
                    (self.folder / "tunnel.log").read_text()
                )
                time.sleep(0.5)
            self.walls.append((f"{shlex.join(words)}, until the page is there", time.monotonic() - began))
            yield address
        finally:
            os.killpg(process.pid, 15)
            process.wait(timeout=30)

    def up(self, tries: int = 3) -> None:
        """Start the cluster; again where the machine is so busy that Ray's own limit of 30 s for a node is not met."""
        try:
            self.ray(*readme_command("ray up cluster.yaml"), "-y")
        except AssertionError as error:
            if tries <= 1 or "timed out during startup" not in str(error):
                raise
            self.up(tries - 1)

    def submit(
        self, *arguments: str, timeout_s: float = 600, fails: bool = False, log: Path | None = None
    ) -> str:
        """`ray submit` of the command line, as on that page."""
        words = readme_command("ray submit cluster.yaml")
        command = words[: words.index("--") + 1]
        return self.ray(*command, *arguments, timeout_s=timeout_s, fails=fails, log=log)

    def on(self, host: int, command: str, timeout_s: float = 60) -> str:
        """A shell command on a host, by its number."""
        done = subprocess.run(
            [str(HERE / "testhosts"), "exec", "--dir", str(self.folder / "hosts"), str(host), "bash", "-c", command],
            capture_output=True, text=True, timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def switch_on_beside(self, host: int) -> None:
        """Make dead hosts run again, while the workers of this one stand still: so a run does not end meanwhile."""
        self.on(host, "pkill -STOP ray::Worker")
        self.start()

    def go_on(self, host: int) -> None:
        """Let the workers of a host go on that stood still."""
        self.on(host, "pkill -CONT ray::Worker")

    def slow_down(self, host: int, percent: int) -> None:
        """Give each worker on a host at most this much of a core from now on, by `cpulimit`."""
        limit = f"setsid cpulimit --limit {percent} --pid $worker </dev/null >/dev/null 2>&1 &"
        self.on(host, f"for worker in $(pgrep ray::Worker); do {limit} done")

    def wait_for_nodes(self, count: int, exactly: bool = False, timeout_s: float = 240) -> None:
        """Wait until so many nodes, or more, are active: `ray up` returns when the head is."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            active = self.on(1, "ray status", timeout_s=timeout_s).partition("Pending:")[0]
            there = sum(int(n) for n in re.findall(r"^ (\d+) local.cluster.node", active, re.MULTILINE))
            if there == count or (there > count and not exactly):
                return
            if time.monotonic() > give_up_at:
                raise AssertionError(active + self.on(1, "tail -n 200 /tmp/ray/session_latest/logs/monitor.*"))
            time.sleep(1)

    def listening(self) -> set[tuple[int, str, int, str]]:
        """(host, address, port, program) of every socket that listens on one of the hosts."""
        found = set()
        for host in range(1, self.count + 1):
            for words in map(str.split, self.on(host, "ss -ltnpH").splitlines()):
                address, _, port = words[3].rpartition(":")
                program = re.search(r'"(.*?)"', words[-1])
                found.add((host, address, int(port), program[1] if program else ""))
        return found

    def close(self) -> None:
        self.tool("down")
        shutil.rmtree(self.folder, ignore_errors=True)
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:10]
        for connections in Path("/tmp").glob(f"ray_ssh_*/{mark}"):
            shutil.rmtree(connections, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _serves(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
