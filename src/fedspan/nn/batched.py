"""A whole cohort as one batched computation.

Chains of plain layers with a known loss have their backward pass written by hand (`nn.chain`, `nn.loss_gradient`).
Other networks go through `torch.func.vmap` over the clients' weights and mini-batches, which is faster than client by
client for plain matrix products and slower for convolutions. Both need batches of equal shape, no running statistics
and no randomness inside the network.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedspan.core import seeds
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.linear_map import LinearMap
from fedspan.core.objective import Direction, Objective, Plus, SteppingDirection, term
from fedspan.core.round import Round
from fedspan.nn.chain import ChainRun
from fedspan.nn.chain_layers import Blocks
from fedspan.nn.loaders import shuffled_examples
from fedspan.nn.objective import TorchObjective, finish_

if TYPE_CHECKING:
    from fedspan.nn.problem import TorchProblem


class _At:
    """The module with other weights, to be called like it."""

    def __init__(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self.model, self.weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.weights, args, kwargs)


class Cohort(Objective):
    """f_i of all clients of a round, together."""

    def __init__(self, problem: TorchProblem, rnd: Round) -> None:
        self.problem, self.rnd, self.training, self.formulas = (
            problem,
            rnd,
            problem.training,
            problem.formulas,
        )
        self.clients: list[int] = rnd.ids[0].tolist()
        self.batches = _draw(problem, rnd, self.clients)
        problem.model.train()

    @functools.cached_property
    def alone(self) -> list[TorchObjective]:
        """f_i of each client."""
        return [TorchObjective(self.problem, self.rnd, client) for client in self.clients]

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) of every client on its next mini-batch."""
        return self.direction()(y)

    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) of every client over all its examples, one after the other."""
        return torch.cat([one.full_grad(x) for one in self.alone], 1)

    def direction(self, plus: Plus = None) -> Direction:
        """y ↦ ∇f_i(y) + plus, or + plus(y)."""
        return CohortDirection(self, plus)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz) + plus; clipped is what a step uses, P ∇f."""
        return CohortDirection(self, plus, x, P)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A mini-batch of every client, as a part of what was gathered for several steps."""

    parts: tuple[torch.Tensor, ...]  # (clients, examples, …)
    place: slice

    @property
    def batch(self) -> tuple[torch.Tensor, ...]:
        """(clients, batch, …) of each part."""
        return tuple(part[:, self.place] for part in self.parts)


def _draw(problem: TorchProblem, rnd: Round, clients: list[int]) -> Iterator[Drawn]:
    """Mini-batches without end. Those of K steps are gathered at once.

    It does not know the `Cohort` that holds it: in a cycle, what was gathered would wait for the garbage collector.
    """
    data, steps = [problem.client_data[client] for client in clients], rnd.local_steps
    batch = min(problem.batch_size, len(data[0]))
    keys = seeds.children(seeds.keys(rnd.seeds[:1], "examples", rnd.t), rnd.ids[0])
    for start in itertools.count(0, steps):
        parts = _gathered(
            data, _examples(keys, [len(one) for one in data], start * batch, steps * batch)
        )
        drawn = [Drawn(parts, slice(k * batch, (k + 1) * batch)) for k in range(steps)]
        if problem.augment is not None:
            alone = [TorchObjective(problem, rnd, client) for client in clients]
            drawn = [_augmented(alone, one, start + k) for k, one in enumerate(drawn)]
        yield from drawn


def _augmented(alone: list[TorchObjective], drawn: Drawn, number: int) -> Drawn:
    batches = [
        one.augmented(tuple(batch), number) for one, *batch in zip(alone, *drawn.batch, strict=True)
    ]
    if len({part.shape for batch in batches for part in batch[:1]}) > 1:
        raise SpecError("`augment` gives batches of several shapes; set engine.simulate to 'loop'")
    return Drawn(tuple(map(torch.stack, zip(*batches, strict=True))), slice(None))


def _examples(keys: seeds.Keys, lengths: list[int], start: int, count: int) -> torch.Tensor:
    """The numbers of the examples of several steps, (clients, count)."""
    if len(set(lengths)) == 1:
        return shuffled_examples(keys, lengths[0], start, count)
    return torch.cat(
        [shuffled_examples(keys[i : i + 1], n, start, count) for i, n in enumerate(lengths)]
    )


def _gathered(data: list[Any], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The examples of every client, (clients, examples, …)."""
    found = []
    for number, part in enumerate(data[0].parts):
        out = part.new_empty(*index.shape, *part.shape[1:])
        for one, rows, place in zip(data, index, out, strict=True):
            torch.index_select(one.parts[number], 0, rows, out=place)
        found.append(out)
    return tuple(found)


class CohortDirection(SteppingDirection):
    """y ↦ ∇f_i(y) + plus of every client; inside x + range(Pᵀ) z ↦ P ∇f_i(x + Pᵀz) + plus."""

    def __init__(
        self, cohort: Cohort, plus: Plus, x: Vector | None = None, P: LinearMap | None = None
    ) -> None:
        self.cohort, self.plus, self.x, self.P = cohort, plus, x, P
        self.base = (
            P @ x if P is not None and x is not None and cohort.training.weight_decay else None
        )
        if cohort.formulas is None:
            self._by_vmap = vmap(grad(self._loss))
        else:
            self._blocks = Blocks(cohort.problem.layout, x, P)
            self._run = ChainRun(*cohort.formulas, self._blocks, len(cohort.clients))

    @property
    def takes_steps(self) -> bool:
        """Whether plain steps can be taken together with the gradients."""
        bare = self.cohort.training.clip is None and not self.cohort.training.weight_decay
        return (
            bare
            and self.cohort.formulas is not None
            and (self.plus is None or isinstance(self.plus, torch.Tensor))
        )

    def descend(self, start: Vector, lr: float, steps: int) -> Vector:
        """The end point of plain steps."""
        clients = len(self.cohort.clients)
        at = [part.expand(clients, *part.shape[1:]).clone() for part in self._blocks.split(start)]
        self._run.bind(at, None, lr)
        plus = (
            list(zip(at, self._blocks.split(self.plus), strict=True))
            if isinstance(self.plus, torch.Tensor)
            else []
        )
        for _ in range(steps):
            drawn = next(self.cohort.batches)
            self._run(drawn.parts, drawn.place)
            for block, more in plus:
                block.sub_(more, alpha=lr)
        self._run.release()
        return torch.cat([block.flatten(1) for block in at], 1).unsqueeze(0)

    def __call__(self, y: Vector) -> Vector:
        drawn = next(self.cohort.batches)
        if self.cohort.formulas is None:
            g = self._gradient(y, drawn.batch)
        else:
            g = y.new_empty(1, len(self.cohort.clients), y.shape[-1])
            self._run.bind(self._blocks.split(y.expand_as(g)), self._blocks.split(g))
            self._run(drawn.parts, drawn.place)
        finish_(g, self.cohort.training, y, self.base)
        return g if self.plus is None else g.add_(term(self.plus, y))

    def _loss(self, weights: dict[str, torch.Tensor], *batch: torch.Tensor) -> torch.Tensor:
        problem = self.cohort.problem
        return problem.loss(_At(problem.model, weights), batch)  # type: ignore[arg-type]

    def _gradient(self, y: Vector, batch: tuple[torch.Tensor, ...]) -> Vector:
        """∇f_i, or P ∇f_i, by `vmap`."""
        if self.P is not None and self.x is not None:
            y = self.x + self.P.T @ y
        clients, blocks = len(self.cohort.clients), self.cohort.problem.layout.blocks
        with torch.inference_mode(False), torch.no_grad():
            own = y.expand(1, clients, -1)[0].clone()
            parts = zip(blocks, own.split([block.size for block in blocks], 1), strict=True)
            weights = {block.name: part.view(-1, *block.shape) for block, part in parts}
            found = self._by_vmap(weights, *(part.clone() for part in batch))
            g = torch.cat(
                [found[block.name].reshape(clients, -1) for block in blocks], 1
            ).unsqueeze(0)
        return g if self.P is None else self.P @ g
