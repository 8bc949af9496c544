"""What a client's memory holds, measured on the method's own code without values.

`memory` looks at a local step in `client_step`. It starts from a download and a state that lie on disk, which are
counted as far as local steps use them: SSF holds where x began inside the subspace, SCAFFOLD c − c_i, and FedProx the x
that it is pulled back to. LoRA methods are the exception: `fedit` forms full gradients in the simulator, and a device
that is short of memory runs PEFT.

`client_peak` looks at the process of a client across machines, in whole rounds of `engine.simulator`. A round starts
from a message in memory and a state on disk, which is mapped: the system may drop its pages at any time, so that they
are not counted. What Python, torch and Flower take themselves is not counted either.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fedspan.core import wire
from fedspan.core.config import Engine, Settings
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Direction, Objective, Plus
from fedspan.core.projector import LinearMap
from fedspan.core.round import Round
from fedspan.costs.dry_run import NOWHERE, Live, empty, rehearsal
from fedspan.engine.simulator import Replica, answer
from fedspan.huggingface.lora import lora
from fedspan.huggingface.text_data import Texts
from fedspan.nn.batches import Batch, batch_size_of
from fedspan.nn.problem import TorchProblem

WATCHED_STEPS = 4  # local steps until all that lasts is there: two to fill it, one to see what is used, one to measure
PROCESS_STEPS = 2  # the same where whole rounds are looked at
UNPACKED = 2  # times that a message is in memory while Flower unpacks it

Method = Method


@dataclass(frozen=True)
class Memory:
    """Bytes in a client's memory at the peak of a local step."""

    weights: int
    gradients: int
    activations: int  # what autograd keeps, the values in between, and the batch
    optimizer: int
    controls: int  # what the method holds from step to step: point, subspace and corrections

    @property
    def peak(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True, eq=False)
class OneBatch:
    """Data of a client that always draws the same batch."""

    batch: Batch

    def __len__(self) -> int:
        return 1

    def take(self, index: torch.Tensor) -> Batch:
        return self.batch


def without_numbers(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device, for training. A tensor that is used in several places stays one tensor."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        new = empty(tensor)
        trains = tensor.requires_grad
        memo[id(tensor)] = nn.Parameter(new, trains) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(model, memo).train()


def largest_batch(problem: TorchProblem) -> Batch:
    """Return the mini-batch that takes most: as many examples as any client's has, and its longest texts."""

    def size(source: Any) -> tuple[int, int]:
        longest = int(source.lengths.max()) if isinstance(source, Texts) else 0
        return batch_size_of(source, problem.batch_size), longest

    source = max(problem.local_data, key=size)
    if isinstance(source, Texts):
        order = source.lengths.argsort(descending=True)
    else:
        order = torch.arange(len(source))
    return source.take(order[: batch_size_of(source, problem.batch_size)])


def dry_problem(problem: TorchProblem) -> TorchProblem:
    """Copy a problem without its values: one client, which always draws the largest batch of any client.

    A copy has shapes and types alone, so the problem it was made of may be let go. A rehearsal uses a copy up; make
    another one of it.
    """
    problem.release()
    batch = tree_map_only(torch.Tensor, empty, largest_batch(problem))
    settings = Settings(
        batch_size=1,
        device=NOWHERE.type,
        training=dataclasses.replace(problem.training, augment=None),
        engine=Engine(recompute=problem.recompute),
    )
    found = TorchProblem(
        without_numbers(problem.model),
        [OneBatch(batch)],
        problem.loss,
        problem.rules,
        settings,
        on_client=True,
    )
    found.device = torch.device("cpu")  # steps are those of a CPU
    return found


def memory(method: Method, problem: TorchProblem) -> Memory:
    """Return the memory of a local step of a method on a network, without values."""
    problem = dry_problem(problem)
    with rehearsal() as live:
        return step_memory(method, problem, live)


def step_memory(method: Method, problem: TorchProblem, live: Live) -> Memory:
    """Return the memory of a local step on a problem of one client with one batch, with values or without.

    It is that of the method's own step, or of PEFT's adapters if the method declares adapters.
    """
    footprint, itemsize = method.footprint(problem.layout), problem.layout.dtype.itemsize
    model, held = problem.model, 0  # `held` is there between two steps, besides model and batch
    if footprint.ranks is not None:
        batch = largest_batch(problem)
        step, model, trained = lora(
            model, lambda m: problem.loss(m, batch), problem.rules, footprint
        )
        footprint, itemsize = dataclasses.replace(footprint, trained=trained), 4
        _count(model, problem, live)
        for _ in range(2):  # the first makes the optimizer's state
            live.restart()
            step()
    else:
        problem.module.checked = True
        base = _count(model, problem, live)
        held = _local_steps(method, problem, live, itemsize * footprint.trained) - base
    weights = sum(t.nbytes for t in _tensors(model))
    gradients, optimizer = itemsize * footprint.trained, itemsize * footprint.optimizer
    controls = max(0, held - optimizer)
    rest = live.peak - weights - gradients - optimizer - controls
    return Memory(weights, gradients, rest, optimizer, controls)


def _local_steps(method: Method, problem: TorchProblem, live: Live, gradient: int) -> int:
    """Run `client_step` until its steps have been seen; bytes alive between two of them."""
    method = dataclasses.replace(method, lr=1.0, local_steps=WATCHED_STEPS)  # type: ignore[type-var]
    rnd = _round(0, dataclasses.replace(problem.layout), -1, WATCHED_STEPS)
    with live.pause(), torch.device(problem.device):
        x = torch.zeros_like(problem.module.flat, dtype=rnd.layout.dtype).view(1, 1, -1)
        down = method.broadcast(method.init_server(x, rnd.layout), rnd)
        state = method.init_client(x, rnd.layout)
    f = _Watched(problem.cohort(rnd), live)
    with torch.no_grad(), suppress(_Measured):
        method.client_step(state, down, f, rnd)
    problem.release()
    return f.start - f.in_place * gradient  # a gradient in place stays from step to step


def client_peak(method: Method, problem: TorchProblem, lag: int) -> int:
    """Return the bytes at the peak of a client's process, if a client takes part in every `lag`-th round.

    Two rounds are looked at: the first, to which the server sends x in full, and a later one, to which it sends what
    the client has missed.
    """
    method = dataclasses.replace(method, lr=1.0, local_steps=PROCESS_STEPS)  # type: ignore[type-var]
    with rehearsal() as live, torch.no_grad():
        problem = dry_problem(problem)
        layout = dataclasses.replace(problem.layout)
        built = live.restart()
        built += max(block.size for block in layout.blocks) * problem.module.flat.itemsize
        problem.in_memory = problem.module.same_dtype  # as on a CPU
        with live.pause():
            x = torch.empty(1, 1, layout.size, dtype=layout.dtype)
            server, replica = method.init_server(x, layout), Replica(method.init_client(x, layout))
            rnd = _round(0, layout, -1, PROCESS_STEPS)
            down = wire.pack(wire.pick(method.broadcast(server, rnd), 0))
        received, state = (
            sum(array.nbytes for array in arrays.values())
            for arrays in (down, wire.pack(replica.state))
        )
        peaks = [max(UNPACKED * received, received + built, received + state)]
        peaks.append(_round_peak(method, problem, down, replica, rnd, live))
        with live.pause():
            if method.logs_changes:  # the server's moves have no values either
                for t in range(lag):
                    server = method.empty_round(server, _round(t, layout, t, PROCESS_STEPS))
            rnd = _round(lag, layout, 0, PROCESS_STEPS)
            message = method.broadcast(server, rnd)
            own_x = None if message.get("sync") is None else message.sync.model
            down, replica = wire.pack(wire.pick(message, 0)), Replica(replica.state, own_x, 0)
        peaks.append(_round_peak(method, problem, down, replica, rnd, live))
    return max(peaks)


def _round_peak(
    method: Method,
    problem: TorchProblem,
    down: wire.Arrays,
    replica: Replica,
    rnd: Round,
    live: Live,
) -> int:
    """Bytes at the peak of a round, from the message in memory to the new state."""
    problem.module.checked = True
    if problem.in_memory:
        problem.module.forget()  # a message has a process of its own
    live.count(tree_leaves(largest_batch(problem)))
    live.restart()
    received = {
        name: torch.empty_like(array) if array.is_meta else array for name, array in down.items()
    }
    answer(method, problem, replica, received, rnd)
    problem.release()
    return live.peak


def _round(t: int, layout: Layout, last_round: int, steps: int) -> Round:
    """A round of one client; the layout is nobody else's, so that no cache gives what is drawn for it to others."""
    ids, before = np.zeros((1, 1), np.int64), np.full((1, 1), last_round)
    return Round(t, (0,), 1, layout, ids, before, local_steps=steps, rounds=t + 1)


def _count(model: nn.Module, problem: TorchProblem, live: Live) -> int:
    """Bytes of model and batch, which are alive from now on."""
    live.count(_tensors(model))
    live.count(tree_leaves(largest_batch(problem)))
    return live.restart()


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


class _Measured(Exception):  # noqa: N818 (it ends a rehearsal that went well)
    """The local steps have been seen, and what the method does after them does not matter."""


class _Watched(Objective):
    """The client's objective. Every gradient is a step; what is alive from one to the next is looked at."""

    def __init__(self, f: Objective, live: Live) -> None:
        self.f, self.live = f, live
        self.steps, self.start, self.in_place = 0, live.now, False

    def grad(self, y: Vector) -> Vector:
        self.next()
        return self.f.grad(y)

    def full_grad(self, x: Vector) -> Vector:
        return self.grad(x)

    def direction(self, plus: Plus = None) -> Direction:
        return self._watched(self.f.direction(plus))

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self._watched(self.f.restrict(x, P, plus))

    def _watched(self, inner: Direction) -> Direction:
        def step(y: Vector) -> Vector:
            self.next()
            return inner(y)

        in_place = getattr(inner, "in_place", None)
        self.in_place = in_place is not None
        vars(step)["in_place"] = in_place
        return step

    def next(self) -> None:
        """Begin a step: the last but one shows what steps use, and the last is measured."""
        self.steps += 1
        if self.steps == WATCHED_STEPS:
            raise _Measured
        self.live.touching = self.steps == WATCHED_STEPS - 2
        if not self.live.touching:
            self.start = self.live.restart()
