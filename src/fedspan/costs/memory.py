"""What a client's memory holds at the peak of a local step: the method's own `client_step`, run without numbers.

The step starts from a download and a state that lie on disk: they are counted as far as local steps use them. So SSF
holds where x began inside the subspace, SCAFFOLD c − c_i, and FedProx the x that it is pulled back to. LoRA methods are
the exception: `fedit` forms full gradients in the simulator, and a device that is short of memory runs PEFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedspan.core.footprint import Footprint
from fedspan.core.layout import Vector
from fedspan.core.linear_map import LinearMap
from fedspan.core.method import Method
from fedspan.core.objective import Direction, InPlaceDirection, Objective, Plus
from fedspan.core.round import Round
from fedspan.costs.dry_run import Live, rehearsal
from fedspan.costs.sketch import OneBatch, Sketch
from fedspan.huggingface.lora import lora
from fedspan.nn.problem import TorchProblem

STEPS = 4  # local steps until all that lasts is there: two to fill it, one to see what is used, one to measure


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
        return self.weights + self.gradients + self.activations + self.optimizer + self.controls


def memory(method: Method[Any, Any, Any, Any], sketch: Sketch) -> Memory:
    """The memory of a local step of a method on a sketched network."""
    problem = sketch.problem()
    with rehearsal() as live:
        return (lora_step if method.footprint(problem.layout).adapters else local_step)(
            method, problem, live
        )


def local_step(method: Method[Any, Any, Any, Any], problem: TorchProblem, live: Live) -> Memory:
    """The memory of the method's own step on a problem of one client, with numbers or without."""
    problem.module.checked = True
    base = _counted(problem.model, problem, live)
    method = dataclasses.replace(method, lr=1.0, local_steps=STEPS)  # type: ignore[type-var]
    layout = dataclasses.replace(
        problem.layout
    )  # of its own: what is drawn for it is in nobody else's cache
    rnd = Round(
        0,
        (0,),
        1,
        layout,
        np.zeros((1, 1), np.int64),
        np.full((1, 1), -1),
        local_steps=STEPS,
        rounds=1,
    )
    with live.pause(), torch.device(problem.device):
        x = torch.zeros_like(problem.module.flat, dtype=layout.dtype).view(1, 1, -1)
        down, state = (
            method.broadcast(method.init_server(x, layout), rnd),
            method.init_client(x, layout),
        )
    f = _Watched(problem, rnd, live)
    with torch.no_grad(), suppress(_Measured):
        method.client_step(state, down, f, rnd)
    problem.release()
    footprint, itemsize = method.footprint(layout), layout.dtype.itemsize
    held = (
        f.start - base - f.in_place * itemsize * footprint.trained
    )  # a gradient in place stays from step to step
    return _parts(problem.model, footprint, itemsize, live.peak, held)


def lora_step(method: Method[Any, Any, Any, Any], problem: TorchProblem, live: Live) -> Memory:
    """The memory of a step of PEFT's adapters in the method's place."""
    (source,), footprint = problem.client_data, method.footprint(problem.layout)
    (batch,) = (source.take(torch.arange(1)),)
    step, model, trained = lora(
        problem.model, lambda m: problem.loss(m, batch), problem.rules, footprint
    )
    _counted(model, problem, live)
    for _ in range(2):  # the first makes the optimizer's state
        live.restart()
        step()
    return _parts(model, dataclasses.replace(footprint, trained=trained), 4, live.peak, 0)


def _counted(model: nn.Module, problem: TorchProblem, live: Live) -> int:
    """Bytes of model and batch, which are alive from now on."""
    live.count(_tensors(model))
    live.count(
        part
        for source in problem.client_data
        if isinstance(source, OneBatch)
        for part in source.tensors()
    )
    return live.restart()


def _parts(model: nn.Module, footprint: Footprint, itemsize: int, peak: int, held: int) -> Memory:
    """The peak by part; `held` is there between two steps, besides the model and the batch."""
    weights = sum(t.nbytes for t in _tensors(model))
    gradients, optimizer = itemsize * footprint.trained, itemsize * footprint.optimizer
    controls = max(0, held - optimizer)
    return Memory(
        weights, gradients, peak - weights - gradients - optimizer - controls, optimizer, controls
    )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


class _Measured(Exception):  # noqa: N818 (it ends a rehearsal that went well)
    """The local steps have been seen, and what the method does after them does not matter."""


class _Watched(Objective):
    """The client's objective. Every gradient is a step; what is alive from one to the next is looked at."""

    def __init__(self, problem: TorchProblem, rnd: Round, live: Live) -> None:
        self.f, self.live = problem.cohort(rnd), live
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
        self.in_place = isinstance(inner, InPlaceDirection)
        return (_InPlace if self.in_place else _Steps)(inner, self.next)

    def next(self) -> None:
        """A step begins: the last but one shows what steps use, and the last is measured."""
        self.steps += 1
        if self.steps == STEPS:
            raise _Measured
        self.live.touching = self.steps == STEPS - 2
        if not self.live.touching:
            self.start = self.live.restart()


class _Steps:
    """A direction that tells when a step begins."""

    def __init__(self, inner: Any, begins: Callable[[], None]) -> None:
        self.inner, self.begins = inner, begins

    def __call__(self, y: Vector) -> Vector:
        self.begins()
        direction: Vector = self.inner(y)
        return direction


class _InPlace(_Steps, InPlaceDirection):
    """The same for steps in place."""

    def in_place(self, start: Vector) -> AbstractContextManager[Vector]:
        point: AbstractContextManager[Vector] = self.inner.in_place(start)
        return point
