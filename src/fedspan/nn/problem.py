"""Clients' data and a torch module as a Problem; the cohort is worked through client by client on one shared module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedspan.core import seeds
from fedspan.core.errors import DataError
from fedspan.core.layout import Vector
from fedspan.core.method import Round
from fedspan.core.objective import Direction, Objective, Plus, Problem, term
from fedspan.core.projector import LinearMap
from fedspan.nn.batched import Cohort
from fedspan.nn.client_data import Batch, ClientData, Loss, Tensors, placed
from fedspan.nn.module import FlatModule, Restricted, shrink
from fedspan.nn.projection_rules import ProjectionRule, digest, kept_in, layout_of

Evaluate = Callable[[nn.Module], Mapping[str, float]]
Augment = Callable[[Batch, torch.Generator], Batch]
SAMPLED_CLIENTS, SAMPLED_EXAMPLES = 10, 64  # of `training_loss`, per problem and per client


class TorchProblem(Problem):
    """A module, its clients' examples, and how to score it."""

    cohort_mode = "per_client"

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientData],
        loss: Loss,
        choices: Sequence[ProjectionRule],
        *,
        seed: int,
        batch: int,
        evaluate: Evaluate | None = None,
        by_examples: bool = False,
        weight_decay: float = 0.0,
        clip: float | None = None,
        augment: Augment | None = None,
        device: str = "cpu",
        recompute: bool = False,
        on_client: bool = False,
    ) -> None:
        if not clients:
            raise DataError("there are no clients; give at least one")
        self.model, self.sources, self.loss, self.choices = model.to(device), clients, loss, choices
        self.seeds, self.batch, self.device, self.recompute = (seed,), batch, torch.device(device), recompute
        self.weight_decay, self.clip, self.augment, self._score = weight_decay, clip, augment, evaluate
        number = kept_in(next(p.dtype for p in model.parameters() if p.requires_grad))
        self.layout = layout_of(choices, number, digest(model))
        self.module = FlatModule(model, self.layout)
        if on_client:  # a client is sent x: its own x0 is a shape, and zeros that take no memory
            self.x0 = torch.zeros(1, 1, 1, dtype=self.layout.dtype).expand(1, 1, self.layout.size)
        else:
            self.x0 = self.module.flat.detach().to(self.layout.dtype, copy=True).cpu().view(1, 1, -1)
        self.clients = len(clients)
        here: Callable[[], Sequence[ClientData]] = getattr(
            clients, "here", lambda: clients
        )  # across machines not all are
        counts = np.array([len(source) for source in here()], np.float64)
        self.weights = counts / counts.sum() if by_examples else None
        self.steps_per_epoch = max(1, round(float(counts.mean()) / batch)) if len(counts) else 1
        kept = model.state_dict().keys()  # a buffer that is not saved is a constant, such as rotary frequencies
        self.tracked = [b for name, b in model.named_buffers() if b.is_floating_point() and name in kept]
        self.buffers0 = self._read_buffers() if self.tracked else None
        self._active: Restricted | None = None

    def cohort(self, rnd: Round) -> Objective:
        """The objective of the one client in `rnd`, or of all of them as one batched computation."""
        self.release()
        alone = [TorchObjective(self, rnd, int(client)) for client in rnd.ids[0]]
        return alone[0] if len(alone) == 1 else Cohort(self, rnd, alone)

    def can_batch(self) -> bool:
        """Whether a cohort may be one batched computation, as far as can be told without trying."""
        sizes = {min(self.batch, len(source)) for source in self.sources}
        tensors = all(isinstance(source, Tensors) for source in self.sources)
        return tensors and len(sizes) == 1 and not any(True for _ in self.model.buffers()) and self.device.type == "cpu"

    def finished(self, g: Vector, point: Vector) -> Vector:
        """The gradient clipped, and with weight decay."""
        if self.clip is not None:
            g = g * shrink(g, self.clip)
        return g + self.weight_decay * point if self.weight_decay else g

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> dict[str, npt.NDArray[np.float64]]:
        """Metrics of a server model on the user's own scorer."""
        self.release()
        self.module.load(x)
        self.write_buffers(buffers)
        self.model.eval()
        with torch.inference_mode():
            found = dict(self._score(self.model)) if self._score is not None else {}
        if not torch.isfinite(x).all():
            found["loss"] = float("nan")
        return {name: np.array([value]) for name, value in found.items()}

    def diverged(self, metrics: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
        """A loss that is not finite; a weight that is not makes it so."""
        return ~np.isfinite(metrics.get("loss", np.zeros(1)))

    def state_dict(self, x: Vector, buffers: Vector | None, run: int = 0) -> dict[str, torch.Tensor]:
        """The module's own `state_dict` with the server's weights and statistics."""
        self.release()
        self.module.load(x)
        self.write_buffers(buffers)
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def trained(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        self.release()
        self.model.load_state_dict(weights)
        return self.model.eval()

    def training_loss(self, x: Vector, buffers: Vector | None = None) -> npt.NDArray[np.float64]:
        """Mean loss in evaluation mode on a fixed sample: up to 10 clients, up to 64 examples per client."""
        self.release()
        self.module.load(x)
        self.write_buffers(buffers)
        self.model.eval()
        clients = self._sample(SAMPLED_CLIENTS, self.clients, 0)
        with torch.inference_mode():
            losses = [self._sampled_loss(client) for client in clients]
        return np.array([np.average(losses, weights=None if self.weights is None else self.weights[clients])])

    def _sampled_loss(self, client: int) -> float:
        source = self.sources[client]
        index = torch.tensor(self._sample(SAMPLED_EXAMPLES, len(source), 1 + client))
        parts = [(len(part), placed(source.take(part), self.device)) for part in index.split(self.batch)]
        return sum(n * float(self.loss(self.model, batch)) for n, batch in parts) / len(index)

    def _sample(self, size: int, of: int, stream: int) -> list[int]:
        """Different numbers below `of`, the same in every call and from a stream that no run uses."""
        key = np.array([seeds.key(self.seeds[0], "training loss", stream)], np.uint64)
        chosen: list[int] = seeds.choose(key, of, min(size, of))[0].tolist()
        return chosen

    def activate(self, x: Vector, P: LinearMap) -> Restricted:
        """The module inside x + range(Pᵀ), until `release`."""
        self.release()
        self._active = Restricted(self.module, self.choices, x, P, self.recompute).__enter__()
        return self._active

    def release(self) -> None:
        """The module as it was."""
        if self._active is not None:
            self._active.__exit__()
            self._active = None

    def write_buffers(self, buffers: Vector | None) -> None:
        """Running statistics of the module's norms, from a flat vector."""
        if buffers is None or not self.tracked:
            return
        parts = buffers.view(-1).split([b.numel() for b in self.tracked])
        with torch.no_grad():
            for buffer, part in zip(self.tracked, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _read_buffers(self) -> Vector:
        return torch.cat([b.detach().reshape(-1).cpu() for b in self.tracked]).view(1, 1, -1)


class TorchObjective(Objective):
    """f_i of one client in one round."""

    def __init__(self, problem: TorchProblem, rnd: Round, client: int) -> None:
        self.problem, self.rnd, self.client = problem, rnd, client
        self.batches = self._draw()
        self._losses = (self._loss(batch, number) for number, batch in enumerate(self.batches))
        problem.model.train()

    def begin(self, buffers: Vector | None) -> None:
        """Start from the server's running statistics."""
        self.problem.write_buffers(buffers)

    def buffers(self) -> Vector | None:
        """The client's running statistics after its local work."""
        return self.problem._read_buffers() if self.problem.tracked else None

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) on the next mini-batch."""
        with torch.inference_mode(False):
            g = self.problem.module.grad(y, next(self._losses)).to(y.device)
        return self.problem.finished(g, y)

    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) over all of the client's examples."""
        source, n = self.problem.sources[self.client], len(self.problem.sources[self.client])
        total = torch.zeros_like(x)
        for number, part in enumerate(torch.arange(n).split(self.problem.batch)):
            with torch.inference_mode(False):
                batch = placed(source.take(part), self.problem.device)
                g = self.problem.module.grad(x, self._loss(batch, number))
            total = total + g.to(x.device) * (len(part) / n)
        return self.problem.finished(total, x)

    def direction(self, plus: Plus = None) -> Direction:
        """y ↦ ∇f_i(y) + plus, or + plus(y)."""
        return _Along(self, self.grad, plus, self.problem.module.walk)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz) + plus, with no full gradient for the covered layers."""
        with torch.inference_mode(False):
            inside = self.problem.activate(x, P)
        base = P @ x if self.problem.weight_decay else None

        def grad(z: Vector) -> Vector:
            with torch.inference_mode(False):
                g = inside.grad(z, next(self._losses)).to(z.device)
            return self.problem.finished(g, z if base is None else base + z)

        covered = all(choice.how != "fallback" for choice in self.problem.choices)
        return _Along(self, grad, plus, inside.walk if covered else None)

    def _loss(self, batch: Batch, number: int) -> Callable[[nn.Module], torch.Tensor]:
        """f on a batch. What the network draws (dropout) is decided by (seed, round, client, step) alone."""

        def loss(model: nn.Module) -> torch.Tensor:
            key = seeds.key(self.rnd.seeds[0], "dropout", self.rnd.t, self.client, number)
            with drawing(key, self.problem.device):
                return self.problem.loss(model, batch)

        return loss

    def _draw(self) -> Iterator[Batch]:
        """Mini-batches by shuffled passes over the client's examples, decided by (seed, round, client) alone."""
        problem, rnd, source = self.problem, self.rnd, self.problem.sources[self.client]
        n, number = len(source), 0
        left = torch.empty(0, dtype=torch.int64)
        for passed in range(1 << 30):
            key = np.array([seeds.key(rnd.seeds[0], "examples", rnd.t, self.client, passed)], np.uint64)
            left = torch.cat([left, torch.from_numpy(seeds.permute(key, n)[0])])
            size = min(problem.batch, n)
            while len(left) >= size:
                batch = placed(source.take(left[:size]), problem.device)
                if problem.augment is not None:
                    state = seeds.key(rnd.seeds[0], "augment", rnd.t, self.client, number) >> 1
                    batch = problem.augment(batch, torch.Generator().manual_seed(state))
                left, number = left[size:], number + 1
                yield batch


class _Along:
    """A direction of one client; `walk` is there where plain steps can be taken in place."""

    def __init__(self, of: TorchObjective, grad: Direction, plus: Plus, walk: Callable[..., Vector] | None) -> None:
        self.of, self.grad, self.plus, self._walk = of, grad, plus, walk
        plain = not of.problem.weight_decay and of.problem.device.type == "cpu"
        if walk is not None and plain and of.problem.module.in_place:
            self.walk = self._in_place

    def __call__(self, y: Vector) -> Vector:
        g = self.grad(y)
        return g if self.plus is None else g + term(self.plus, y)

    def _in_place(self, start: Vector, lr: float, steps: int) -> Vector:
        assert self._walk is not None
        with torch.inference_mode(False):
            return self._walk(start, self.plus, self.of._losses, lr, steps, self.of.problem.clip)


@contextlib.contextmanager
def drawing(key: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators begin at `key`, and afterwards are where they were."""
    used = [torch.default_generator]
    if device.type == "cuda":
        used.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in used]
    try:
        for generator in used:
            generator.manual_seed(key >> 1)
        yield
    finally:
        for generator, state in zip(used, before, strict=True):
            generator.set_state(state)
