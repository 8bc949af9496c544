"""What a client's memory holds, measured on the method's own code without values.

`memory` looks at a local step in `client_step`. It starts from a download and a state that lie on disk, which are
counted as far as local steps use them: SSF holds where x began inside the subspace, SCAFFOLD c − c_i, and FedProx the x
that it is pulled back to. LoRA methods are the exception: `fedit` forms full gradients in the simulator, and a device
that is short of memory runs PEFT.

`client_peak` looks at the process of a client across machines, in whole rounds of `engine.simulator`. A round starts
from a message in memory and a state on disk, which is mapped: the system may drop its pages at any time, so that they
are not counted. What Python, torch and Flower take themselves is not counted either.
"""

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
from fedspan.core.config import Settings
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Direction, Objective, Plus
from fedspan.core.projector import LinearMap
from fedspan.core.round import Round
from fedspan.costs.dry_run import NOWHERE, Live, empty, rehearsal
from fedspan.costs.traffic import bytes_of
from fedspan.engine.simulator import Replica, answer
from fedspan.huggingface.adapters import lora
from fedspan.huggingface.text_data import Texts
from fedspan.nn.batches import Batch, batch_size_of
from fedspan.nn.problem import TorchProblem

WATCHED_STEPS = 4  # local steps until all that lasts is there: two to fill it, one to see what is used, one to measure
PROCESS_STEPS = 2  # the same where whole rounds are looked at
UNPACKED = 2  # times that a message is in memory while Flower unpacks it


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
    memo: dict[int, Any] = {id(buffer): empty(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(empty(parameter), parameter.requires_grad)
    return copy.deepcopy(model, memo).train()


def largest_batch(problem: TorchProblem) -> Batch:
    """Return the mini-batch that takes most: as many examples as any client's has, and its longest texts."""

    def size(source: Any) -> tuple[int, int]:
        longest = int(source.lengths.max()) if isinstance(source, Texts) else 0
        return batch_size_of(source, problem.batch_size), longest

    source = max(problem.local_data, key=size)
    order = torch.arange(len(source))
    if isinstance(source, Texts):
        order = source.lengths.argsort(descending=True)
    return source.take(order[: size(source)[0]])


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
    )
    model, data = without_numbers(problem.model), [OneBatch(batch)]
    found = TorchProblem(model, data, problem.loss, problem.rules, settings, on_client=True)
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
    model, batch, step, held = problem.model, largest_batch(problem), None, 0
    if footprint.ranks is not None:
        step, model, trained = lora(
            model, lambda m: problem.loss(m, batch), problem.rules, footprint
        )
        footprint, itemsize = dataclasses.replace(footprint, trained=trained), 4
    tensors = [*model.parameters(), *model.buffers()]
    live.count([*tensors, *tree_leaves(batch)])
    base, gradients = live.restart(), itemsize * footprint.trained
    if step is None:
        start, in_place = _local_steps(method, problem, live)
        held = start - base - in_place * gradients  # a gradient in place stays from step to step
    else:
        for _ in range(2):  # the first makes the optimizer's state
            live.restart()
            step()
    weights, optimizer = sum(t.nbytes for t in tensors), itemsize * footprint.optimizer
    controls = max(0, held - optimizer)
    rest = live.peak - weights - gradients - optimizer - controls
    return Memory(weights, gradients, rest, optimizer, controls)


def _local_steps(method: Method, problem: TorchProblem, live: Live) -> tuple[int, bool]:
    """Run `client_step` until its steps have been seen.

    Returns:
        Bytes alive between two steps, and whether gradients are among them.
    """
    method = dataclasses.replace(method, lr=1.0, local_steps=WATCHED_STEPS)  # type: ignore[type-var]
    problem.module.checked = True
    rnd = _round(0, dataclasses.replace(problem.layout), -1, WATCHED_STEPS)
    with live.pause(), torch.device(problem.device):
        x = torch.zeros_like(problem.module.flat, dtype=rnd.layout.dtype).view(1, 1, -1)
        down = method.broadcast(method.init_server(x, rnd.layout), rnd)
        state = method.init_client(x, rnd.layout)
    loss, steps, start = problem.loss, itertools.count(1), 0

    def watched(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal start
        step = next(steps)
        if step == WATCHED_STEPS:  # the step before is measured
            raise _Measured
        live.touching = step == WATCHED_STEPS - 2  # it shows what steps use
        if not live.touching:
            start = live.restart()
        return loss(model, batch)

    problem.loss, f = watched, _Watched(problem.cohort(rnd))
    with torch.no_grad(), suppress(_Measured):
        method.client_step(state, down, f, rnd)
    problem.release()
    return start, f.in_place


class _Measured(Exception):  # noqa: N818 (it ends a rehearsal that went well)
    """The local steps have been seen, and what the method does after them does not matter."""


class _Watched(Objective):
    """The client's objective; it notes whether gradients stay in memory from step to step."""

    def __init__(self, f: Objective) -> None:
        self.f, self.in_place = f, False

    def grad(self, y: Vector) -> Vector:
        return self.f.grad(y)

    def full_grad(self, x: Vector) -> Vector:
        return self.f.grad(x)

    def direction(self, plus: Plus = None) -> Direction:
        return self._noted(self.f.direction(plus))

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self._noted(self.f.restrict(x, P, plus))

    def _noted(self, found: Direction) -> Direction:
        self.in_place = hasattr(found, "in_place")
        return found


def client_peak(method: Method, problem: TorchProblem, lag: int) -> int:
    """Return the bytes at the peak of a client's process, if a client takes part in every `lag`-th round.

    Two rounds are looked at: the first, to which the server sends x in full, and a later one, to which it sends what
    the client has missed.
    """
    method = dataclasses.replace(method, lr=1.0, local_steps=PROCESS_STEPS)  # type: ignore[type-var]
    with rehearsal() as live, torch.no_grad():
        problem = dry_problem(problem)
        module, layout = problem.module, dataclasses.replace(problem.layout)
        built = live.restart() + max(block.size for block in layout.blocks) * module.flat.itemsize
        problem.in_memory = module.same_dtype  # as on a CPU
        with live.pause():
            x = torch.empty(1, 1, layout.size, dtype=layout.dtype)
            server, replica = method.init_server(x, layout), Replica(method.init_client(x, layout))
        peaks = []
        for t in (0, lag):
            with live.pause():
                for missed in range(lag) if t and method.logs_changes else ():
                    # the server's moves have no values either
                    server = method.empty_round(
                        server, _round(missed, layout, missed, PROCESS_STEPS)
                    )
                rnd = _round(t, layout, 0 if t else -1, PROCESS_STEPS)
                message = method.broadcast(server, rnd)
                down = wire.pack(wire.pick(message, 0))
                if t:
                    own_x = None if message.get("sync") is None else message.sync.model
                    replica = Replica(replica.state, own_x, 0)
                else:
                    received = sum(array.nbytes for array in down.values())
                    state = bytes_of(replica.state)
                    peaks.append(max(UNPACKED * received, received + built, received + state))
            module.checked = True
            if problem.in_memory:
                module.forget()  # a message has a process of its own
            live.count(tree_leaves(largest_batch(problem)))
            live.restart()
            there = {
                name: torch.empty_like(array) if array.is_meta else array
                for name, array in down.items()
            }
            answer(method, problem, replica, there, rnd)
            problem.release()
            peaks.append(live.peak)
    return max(peaks)


def _round(t: int, layout: Layout, last_round: int, steps: int) -> Round:
    """Return a round of one client; the layout is nobody else's, so that no cache gives its draws to others."""
    ids, before = np.zeros((1, 1), np.int64), np.full((1, 1), last_round)
    return Round(t, (0,), 1, layout, ids, before, local_steps=steps, rounds=t + 1)
