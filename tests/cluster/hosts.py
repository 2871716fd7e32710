"""Machines to run a cluster on: network, process and mount namespaces of this one, reached over real ssh."""

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
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
        (self.home / ".ray").mkdir(parents=True)
        self.file = self.folder / "cluster.yaml"

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
        said = self.tool("up", str(self.count))
        self.head = re.search(r"HEAD_IP=(\S+)", said)[1]  # type: ignore[index]
        self.workers = re.search(r"WORKER_IPS='(.*)'", said)[1].split()  # type: ignore[index]
        if not self.file.exists():
            self._write_cluster_file()

    def _write_cluster_file(self) -> None:
        """local.yaml with the addresses of these hosts, small stores, and nothing to install."""
        token = self.home / ".ray" / "auth_token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        cluster: dict[str, Any] = yaml.safe_load((PROJECT / "experiments/cluster/local.yaml").read_text())
        cluster["cluster_name"] = f"raysim-test-{self.folder.name}"
        cluster["provider"] |= {"head_ip": self.head, "worker_ips": self.workers}
        cluster["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.folder / "hosts" / "id_ed25519")}
        cluster["min_workers"] = cluster["max_workers"] = len(self.workers)
        setup = [c for c in cluster["setup_commands"] if "/bin/uv" not in c]
        cluster["setup_commands"] = [c.replace("$HOME/raysim-venv/bin", f"{sys.prefix}/bin") for c in setup]
        for key, extra in {"head_start_ray_commands": "", "worker_start_ray_commands": " --num-cpus=2"}.items():
            stop, start = cluster[key]
            start = start.replace("ray start", "RAY_worker_niceness=0 ray start")  # or other work on this machine wins
            cluster[key] = [stop, f"{start} --object-store-memory=200000000 --memory=2000000000{extra}"]
        self.file.write_text(yaml.safe_dump(cluster, sort_keys=False))

    def ray(self, *arguments: str, timeout_s: float = 600, fails: bool = False, log: Path | None = None) -> str:
        """A `ray` command outside, in the folder of the project; its output, which also grows in `log`."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "PYTHONPATH"}
        environment |= {"HOME": str(self.home), "RAY_TMPDIR": str(self.folder / "client"), "TERM": "dumb"}
        began, log = time.monotonic(), log or self.folder / "ray.log"
        with log.open("w") as output:
            done = subprocess.run(
                [RAY, *arguments], stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, env=environment,
                cwd=PROJECT, stdin=subprocess.DEVNULL,
            )
        self.walls.append((f"ray {' '.join(arguments)}", time.monotonic() - began))
        said = log.read_text()
        assert (done.returncode != 0) == fails, f"ray {' '.join(arguments)} ended with {done.returncode}:\n{said}"
        return said

    def up(self, tries: int = 3) -> None:
        """Start the cluster; again where the machine is so busy that Ray's own limit of 30 s for a node is not met."""
        try:
            self.ray("up", "-y", "--no-config-cache", str(self.file))
        except AssertionError as error:
            if tries <= 1 or "timed out during startup" not in str(error):
                raise
            self.up(tries - 1)

    def submit(
        self, *arguments: str, timeout_s: float = 600, fails: bool = False, log: Path | None = None
    ) -> str:
        """`ray submit` of the command line, as in the README."""
        command = ["submit", str(self.file), "raysim/__main__.py", "--", *arguments]
        return self.ray(*command, timeout_s=timeout_s, fails=fails, log=log)

    def on(self, host: int, command: str, timeout_s: float = 60) -> str:
        """A shell command on a host, by its number."""
        done = subprocess.run(
            [str(HERE / "testhosts"), "exec", "--dir", str(self.folder / "hosts"), str(host), "bash", "-c", command],
            capture_output=True, text=True, timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def wait_for_nodes(self, count: int, exactly: bool = False, timeout_s: float = 240) -> None:
        """Wait until so many nodes, or more, are active: `ray up` returns when the head is."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            active = self.on(1, "ray status").partition("Pending:")[0]
            there = sum(int(n) for n in re.findall(r"^ (\d+) local.cluster.node", active, re.MULTILINE))
            if there == count or (there > count and not exactly):
                return
            assert time.monotonic() < give_up_at, active
            time.sleep(1)

    def close(self) -> None:
        self.tool("down")
        shutil.rmtree(self.folder, ignore_errors=True)
