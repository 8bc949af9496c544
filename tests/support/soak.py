"""A server and its clients in one process, on a disk and a network that fail where a test says so.

The clients are Flower apps on a grid in this process, and their files and the server's are real. Time stands still but
for what the server waits. Everything follows from a seed, so that a failure can be repeated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from fedspan.core.errors import CheckpointError, FedspanError
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.result import Result
from fedspan.engine.simulator import Simulator
from fedspan.remote import server as remote_server
from fedspan.remote.client import StateFile
from fedspan.remote.flower import server
from fedspan.remote.flower.client import agreement_of
from fedspan.remote.flower.records import RunConfig
from fedspan.remote.messages import DroppedError
from support.files import damage
from support.flower import FakeGrid, spec_of
from support.killing import CALLS, KilledError
from support.loops import Scripted, close
from support.rounds import rounds_in

METHOD = {
    "name": "ssf",
    "space": {"name": "coordinate", "rank": 4},
    "lr": 0.02,
    "local_steps": 2,
}
DAMAGES = ("delete", "cut", "empty", "zeros", "double", "flip")


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Disk:
    """The calls that change files. `fail` lets the server's or a client's next ones fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}
        self.real["fsync"] = lambda _: None  # thousands of real ones would take minutes
        self.who, self.calls = "operator", Counter[str]()
        self.plans: dict[str, tuple[int, str]] = {}  # who → (call, how it fails)
        self.dead: set[str] = set()
        self.struck = Counter[str]()
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(name))

    def fail(self, who: str, after: int, kind: str) -> None:
        """The call after so many more of `who` fails: "crash", "short" (half a write, then a crash), "full" or "io"."""
        self.plans[who] = (self.calls[who] + after, kind)

    def heal(self, who: str) -> None:
        """A new process, and space on the disk; a fault that has yet to happen still does."""
        self.dead.discard(who)
        if self.plans.get(who, (0, ""))[0] < self.calls[who]:
            self.plans.pop(who, None)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            who = self.who
            if who in self.dead:
                raise KilledError  # no clean-up touches the disk any more
            number, (at, kind) = self.calls[who], self.plans.get(who, (1 << 60, ""))
            self.calls[who] += 1
            if number < at:
                return self.real[name](*arguments, **named)
            self.struck[f"{who} {kind}"] += number == at
            half = name == "pwrite" and len(arguments[1]) > 1
            if number == at and half and kind in ("short", "full"):
                done = self.real[name](
                    arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:]
                )
                if kind == "full":
                    return done
            if kind in ("crash", "short"):
                self.dead.add(who)
                raise KilledError
            if kind == "full" and name == "pwrite":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if kind == "io" and number == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return self.real[name](*arguments, **named)

        return call


class Grid(FakeGrid):
    """Flower's grid, whose nodes and messages fail as `plan` says: train message number → kind of fault."""

    def __init__(self, spec: Spec, states_dir: Path, disk: Disk, rng: random.Random) -> None:
        super().__init__(spec, states_dir)
        self.disk, self.rng = disk, rng
        self.plan: dict[int, str] = {}
        self.trained = 0
        self.slow: dict[
            int, Message
        ] = {}  # by client: work that goes on after the server has stopped waiting for it
        self.replies: dict[int, Message] = {}  # the last reply of each client
        self.done = Counter[str]()  # the faults that happened

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        if any(message.metadata.message_type == "train" for message in messages):
            for number in range(self.trained + 1, self.trained + 1 + len(messages)):
                self._die_at(number, "server dies sending")
        return super().push_messages(messages)

    def pull_messages(self, idents: Iterable[str]) -> list[Message]:
        found = super().pull_messages(idents)
        self._die_at(self.trained, "server dies receiving")
        if found and self.plan.get(self.trained) == "duplicate":
            del self.plan[self.trained]
            self._count("duplicate")
            return found * 2
        return found

    def answer(self, message: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return self._work(message)
        self.trained += 1
        client = self.clients[message.metadata.dst_node_id]
        kind = self.plan.get(self.trained, "")
        reply = self._train(message, client, kind)
        if kind != "orphan" and client in self.slow:  # its process writes the client's file last
            self._work(self.slow.pop(client))
        if reply is not None:
            self.replies[client] = reply
        return reply

    def _train(self, message: Message, client: int, kind: str) -> Message | None:
        if kind.startswith("client "):
            self.disk.fail("client", self.rng.randrange(9), kind.removeprefix("client "))
        elif kind.startswith("file "):
            self._damage(client, kind.removeprefix("file "))
        elif kind == "never starts":
            self._count(kind)
            return self.rng.choice([None, Message(Error(code=8, reason="gone"), reply_to=message)])
        elif kind == "moves" and len(self.clients) == 7:
            node = next(n for n, one in self.clients.items() if one == client)
            self.clients[node + 1000] = self.clients.pop(node)
            self._count(kind)
        elif kind == "orphan":
            self._count(kind)
            self.slow[client] = message
            return None
        old = self.replies.get(client)
        reply = self._work(message)
        if kind == "reply lost":
            self._count(kind)
            return None
        if kind == "late" and old is not None:
            self._count(kind)
            return Message(old.content, reply_to=message)
        return reply

    def _work(self, message: Message) -> Message | None:
        self.disk.who = "client"
        try:
            node = message.metadata.dst_node_id
            if node not in self.clients:  # an orphan of a node that has moved
                message.metadata.__dict__["_dst_node_id"] = node + 1000
            return super().answer(message)
        except KilledError:
            return None
        finally:
            self.disk.who = "server"
            self.disk.heal("client")

    def _damage(self, client: int, how: str) -> None:
        path = self.states_dir / "run" / f"client-{client}.safetensors"
        others = [p for p in sorted(path.parent.glob("client-*.safetensors")) if p != path]
        if not path.exists() or (how == "foreign" and not others):
            return
        before, self.disk.who = (
            self.disk.who,
            "operator",
        )  # else a fault of the server's disk would strike here
        if how == "foreign":
            path.write_bytes(self.rng.choice(others).read_bytes())
        else:
            damage(path, how)
        self.disk.who = before
        self._count(f"file {how}")

    def _die_at(self, number: int, kind: str) -> None:
        if self.plan.get(number) != kind:
            return
        del self.plan[number]
        self._count(kind)
        self.disk.dead.add("server")
        raise KilledError

    def _count(self, kind: str) -> None:
        self.done[kind] += 1


class World:
    """A run from its first start to its end, with everything that its operators do about faults."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int = 0,
        rounds: int = 12,
        **config: Any,
    ) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.spec = spec_of(METHOD, rounds=rounds, eval_every=3)
        self.disk, self.loops = Disk(patch), list[Loop]()
        self.grid = Grid(self.spec, folder / "states", self.disk, self.rng)
        self.config = {
            "run_dir": str(folder / "out"),
            "timeout": 0.5,
            "wait": 0.0,
            "pause": 600.0,
        } | config
        self.refusals: list[str] = []
        self.strikes: list[
            tuple[int, str]
        ] = []  # (call, how it fails) of the next processes of the server
        clock = Clock()
        for module in (server, remote_server):
            patch.setattr(module, "time", clock)
        patch.setattr(server, "Loop", self._keep)

    def _keep(self, *arguments: Any, **settings: Any) -> Loop:
        self.loops.append(Loop(*arguments, **settings))
        return self.loops[-1]

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def start(self, resume: bool) -> Result | None:
        """One process of the server: its result, or None where it died or was refused."""
        self.disk.heal("server")
        if self.strikes:
            self.disk.fail("server", *self.strikes.pop())
        self.disk.who = "server"
        try:
            return server.serve(self.spec, self.grid, RunConfig(**self.config | {"resume": resume}))  # type: ignore[arg-type]
        except KilledError:
            return None
        except FedspanError as error:
            self.refusals.append(str(error))
            return None
        finally:
            self.disk.who = "operator"

    def finish(self, between: Callable[[], Callable[[], None] | None] = lambda: None) -> Result:
        """Start the server until the run is over.

        `between` happens while it is down, and gives what its operator does about it where the run is refused. Damage
        may be found rounds later, and by then the last backup may have it too.
        """
        mends = list[Callable[[], None]]()
        result, resume = self.start(False), True
        for _ in range(200):
            if result is not None:
                return result
            mend, before = between(), len(self.refusals)
            mends += [] if mend is None else [mend]
            result = self.start(resume)
            refused = self.refusals[before:]
            resume = not any(
                "no checkpoint" in said for said in refused
            )  # it died before its first checkpoint
            if refused and mends and "cannot write" not in refused[-1]:
                mends.pop()()
                resume = True
        raise AssertionError(f"the run does not end: {self.refusals[-3:]}")

    def check(self, result: Result) -> None:
        """The model is the simulator's with the same accepted replies, and c is the mean of the clients' own c_i."""
        assert result.status == "finished"
        assert not any("\n" in said for said in self.refusals), "an error is one line"
        every = range(0, self.spec.rounds + self.spec.eval_every, self.spec.eval_every)
        assert [row["round"] for row in result.history] == sorted(
            {min(t, self.spec.rounds) for t in every}
        )
        rounds = rounds_in(self.out)
        assert [one["round"] for one in rounds] == list(range(self.spec.rounds))
        missing = {
            (one["round"], c) for one in rounds for c in one["sampled"] if c not in one["accepted"]
        }
        problem = self.spec.task.build((self.spec.seed,), self.spec)
        reference = Loop(
            self.spec.method,
            problem,
            Scripted(Simulator(self.spec.method, problem), missing),
            (0,),
            3,
        )
        with torch.inference_mode():
            for _ in range(self.spec.rounds):
                reference.step()
        loop = next(one for one in reversed(self.loops) if one.t == self.spec.rounds)
        x = problem.layout.join({k: v[None, None] for k, v in result.weights[0].items()})
        close(x, reference.model(), 1e-6)
        close(loop.server.c, reference.server.c, 1e-6)
        controls = self.controls(loop)
        if len(controls) == loop.problem.clients:
            close(controls.mean(0), loop.server.c.flatten(), 1e-6)

    def controls(self, loop: Loop) -> torch.Tensor:
        """c_i of every client as its next round begins: from its file, or where that is refused from the copy.

        A client of whom both are damaged is left out: its next round would be refused.
        """
        end: Any = loop.transport
        agreement = agreement_of(self.spec, loop.problem)
        found = []
        for client in range(7):
            copy, own = None, None
            with contextlib.suppress(CheckpointError):
                copy = own = end.copies.tables["c"].take(np.array([client]))[0]
            if end.accepted[client]:
                file = StateFile.of(self.grid.states_dir, "run", f"client-{client}")
                with contextlib.suppress(DroppedError):
                    own = file.load(
                        int(end.accepted[client]),
                        int(end.marks[client]),
                        agreement.of_states,
                    ).state.c.flatten()
            if own is not None and copy is not None:
                close(own, copy, 1e-6)
            found += [] if own is None else [own]
        return torch.stack(found)

    def server_files(self) -> list[Path]:
        return (
            sorted(path for path in self.out.rglob("*") if path.is_file())
            if self.out.exists()
            else []
        )


@contextlib.contextmanager
def world(folder: Path, seed: int = 0, **config: Any) -> Iterator[World]:
    """A world whose disk and clock are those of this process while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        yield World(folder, patch, seed, **config)
    shutil.rmtree(folder, ignore_errors=True)
