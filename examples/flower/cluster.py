"""A SuperLink and SuperNodes on this machine, for trying things out; everything it starts, it ends by process id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
APP = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Cluster:
    """`with Cluster(folder, nodes=3) as cluster: cluster.run(run_dir="…")`.

    With `simulation` the nodes are Flower's virtual ones, inside the SuperLink; with `tls` every node has its own key.
    `module` is what the nodes themselves choose to import for a task "custom"; `data` has the file of each node's own
    rows, whose name without its ending is the client's.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        database: bool = False,
        tls: bool = False,
        simulation: bool = False,
        module: str = "",
        data: Sequence[Path] = (),
    ) -> None:
        self.folder, self.count, self.database, self.tls, self.simulation = (
            folder,
            nodes,
            database,
            tls,
            simulation,
        )
        self.port, self.module, self.data = free_port(), module, data
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = os.environ | {
            "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "RAY_USAGE_STATS_ENABLED": "0", "FEDSPAN_STATES": str(folder / "states"), "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }  # fmt: skip

    def __enter__(self) -> Cluster:
        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, lambda *_: sys.exit(143)
            )  # leave the cluster, so that everything is ended
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        if self.tls:
            make_certificates(self.folder)
        trust = f'root-certificates = "{self.folder / "ca.crt"}"' if self.tls else "insecure = true"
        config = f'[superlink]\ndefault = "dep"\n[superlink.dep]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        (self.folder / "home" / "config.toml").write_text(config, "utf-8")
        try:
            self.start_link()
            for number in range(0 if self.simulation else self.count):
                if self.tls:
                    self.register(number)
                self.start_node(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        patience = time.monotonic() + 8
        while living := self.living():
            if time.monotonic() > patience:  # also those that one of them has just started
                for pid in living:
                    kill(pid)
            for process in self.processes.values():
                process.poll()  # takes note of the dead
            time.sleep(0.2)
        for process in self.processes.values():
            process.wait()

    def living(self, command: str = "") -> list[int]:
        """Ids of the processes that this cluster has started, directly or not; `command` picks those that run it."""
        mark, found = f"FLWR_HOME={self.folder / 'home'}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (place / "environ").read_bytes().split(b"\0")
                words = (place / "cmdline").read_bytes().decode().split("\0")
            except (OSError, UnicodeDecodeError):  # it has ended, or is not ours to look at
                continue
            if ours and any(word.endswith(command) for word in words[:2]):
                found.append(int(place.name))
        return sorted(found)

    def start_link(self) -> None:
        more = ["--database", str(self.folder / "link.db")] if self.database else []
        more += ["--simulation"] if self.simulation else []
        if self.tls:
            own = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
            safety = [
                part
                for name, file in own.items()
                for part in (f"--ssl-{name}", str(self.folder / file))
            ]
            safety.append("--enable-supernode-auth")
        else:
            safety = ["--insecure"]
        self._start(
            "link",
            "flower-superlink",
            *safety,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *more,
        )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.processes["link"].poll() is not None:
                break
            time.sleep(0.2)
        raise RuntimeError(f"the SuperLink did not start; see {self.folder / 'link.log'}")

    def key(self, number: int) -> Path:
        """A node's own key pair."""
        path = self.folder / f"node{number}"
        if not path.exists():
            quietly("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path))
        return path

    def register(self, number: int) -> None:
        """Make a node's key known to the SuperLink."""
        self._flwr("supernode", "register", str(self.key(number).with_suffix(".pub")), "dep")

    def start_node(self, number: int, key: Path | None = None, client: int | None = None) -> None:
        """Start a SuperNode; `key` is another than its own, and `client` another number that it claims."""
        client = number if client is None else client
        own, name = f' module="{self.module}"' if self.module else "", f"client-{client}"
        if self.data:
            own, name = f' data="{self.data[client].resolve()}"', self.data[client].stem
        safety = ["--insecure"]
        if self.tls:
            mine = str(key or self.key(number))
            safety = [
                "--root-certificates",
                str(self.folder / "ca.crt"),
                "--auth-supernode-private-key",
                mine,
            ]
        self._start(
            f"node{number}", "flower-supernode", *safety, "--superlink", f"127.0.0.1:{self.port}",
            "--host", "127.0.0.1", "--port", str(free_port()),
            "--node-config", f'partition-id={client} client-id="{name}"{own}',
        )  # fmt: skip

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command), *arguments],
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
            )

    def crash(self, name: str) -> None:
        """End one process at once; what it has started lives on."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def run(self, app: Path = APP, **config: Any) -> str:
        """Submit a run; its id."""
        settings = (
            self.folder / "run.toml"
        )  # a file: on the command line Flower takes no quotes inside a value
        settings.write_text(
            "".join(
                f"{key.replace('_', '-')} = {json.dumps(value)}\n" for key, value in config.items()
            ),
            "utf-8",
        )
        virtual = f"num-supernodes={self.count} client-resources-num-cpus=1"
        more = ["--federation-config", virtual] if self.simulation else []
        done = self._flwr(
            "run", str(app), "dep", "--run-config", str(settings), *more, "--format", "json"
        )
        said = json.loads(done)
        if "run-id" not in said:
            raise RuntimeError(f"flwr run failed: {said}")
        return str(said["run-id"])

    def status(self, run: str) -> dict[str, Any]:
        """What Flower says of a run."""
        runs = json.loads(self._flwr("ls", "dep", "--format", "json"))["runs"]
        return next(one for one in runs if str(one["run-id"]) == run)

    def wait(self, run: str, seconds: float = 300) -> dict[str, Any]:
        """Until a run is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.living("flwr-serverapp") and not self.living("flwr-simulation"):
                found = self.status(
                    run
                )  # takes a second of computing: only when there is something to learn
                if str(found["status"]).startswith("finished"):
                    return found
            time.sleep(0.5)
        raise TimeoutError(
            f"run {run} is not over after {seconds} s; see the logs in {self.folder}"
        )

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            capture_output=True,
            text=True,
            env=self.env,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {arguments[0]} failed: {done.stdout} {done.stderr}")
        return done.stdout


def kill(pid: int) -> None:
    """End a process at once, without a word of warning."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def make_certificates(folder: Path) -> None:
    """A certificate authority of one's own and a certificate for 127.0.0.1."""
    ca, server = folder / "ca", folder / "server"
    short = ["-days", "2", "-nodes", "-newkey", "rsa:2048"]
    quietly(
        "openssl",
        "req",
        "-x509",
        *short,
        "-subj",
        "/CN=fedspan-ca",
        "-keyout",
        f"{ca}.key",
        "-out",
        f"{ca}.crt",
    )
    quietly(
        "openssl", "req", "-x509", *short, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
        "-addext", "basicConstraints=critical,CA:FALSE", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key",
        "-keyout", f"{server}.key", "-out", f"{server}.pem",
    )  # fmt: skip


def quietly(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr}")
