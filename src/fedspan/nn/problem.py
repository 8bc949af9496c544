"""Clients' data and a torch module as a Problem; the clients of a round share one module."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedspan.core import seeds
from fedspan.core.config import Settings
from fedspan.core.layout import Vector, all_finite
from fedspan.core.objective import Objective, Problem
from fedspan.core.projector import LinearMap
from fedspan.core.round import Round
from fedspan.nn.batches import (
    Clients,
    Loss,
    Tensors,
    augmentation,
    batch_size_of,
    placed,
    sizes_of,
    steps_per_epoch,
)
from fedspan.nn.chain import Chain, chain_of
from fedspan.nn.evaluate import Evaluator
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.objective import Cohort, TorchObjective
from fedspan.nn.projection_rules import ProjectionRule, frozen_digest, layout_of, state_dtype

COUNTER = "num_batches_tracked"  # of BatchNorm; with momentum=None it weights the next batch
Numbers = npt.NDArray[np.float64]  # one per run
Evaluation = tuple[dict[str, Any], dict[str, list[float]]]
"""A client's row of metrics, and by name the summaries whose sums give the metrics of all clients' examples."""
SAMPLED_CLIENTS, SAMPLED_EXAMPLES = 10, 64  # of `training_loss`, per problem and per client


class TorchProblem(Problem):
    """A module, its clients' examples, and how the module is evaluated.

    Args:
        model: The module; it is moved to the device of the settings and trained in place.
        clients: One client's examples each; `Clients` where only some are on this machine, or are read later.
        loss: `loss(model, batch)`, the mean over the examples of a batch.
        rules: What becomes of each trained tensor, from `projection_rules(model)`.
        settings: Batch size, device, clip, weight decay and so on.
        seed: Decides the mini-batches, dropout and augmentation.
        on_client: Whether this is one client's machine, which needs no copy of the start unless the settings say so.
        names: The clients' names. None: their numbers.
        tests: The evaluations on the "test set" and the "validation set", as far as there are any.
        client_tests: Gives the part (train, test or validation) that a client is evaluated on, and its evaluation.
            None: clients are not evaluated.
        usage: How the trained model is used, as plain values.
    """

    # numbers of a model that clients in one process train in the memory of x itself
    large = 1 << 22

    cohort_mode = "per_client"

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Any],
        loss: Loss,
        rules: Sequence[ProjectionRule],
        settings: Settings,
        *,
        seed: int = 0,
        on_client: bool = False,
        names: Sequence[str] | None = None,
        tests: Mapping[str, Evaluator] | None = None,
        client_tests: Callable[[int], tuple[str, Evaluator]] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        self.device, self.training = settings.torch_device, settings.training
        self.batch_size = settings.examples_per_batch
        self.model, self.loss, self.rules = model.to(self.device), loss, rules
        self.client_data, self.clients, self.names = clients, len(clients), names
        self.here: Sequence[int] = getattr(clients, "here", range(len(clients)))
        self.seeds, self.on_client = (seed,), on_client
        self.tests, self.client_tests = tests or {}, client_tests
        self.usage = dict(usage or {})
        single = settings.dp is not None and settings.dp.level == "example"
        self.privacy = settings.dp if single else None
        self.augment = augmentation(self.training.augment)
        dtype = state_dtype(next(p.dtype for p in model.parameters() if p.requires_grad))
        self.layout = layout_of(rules, dtype, frozen_digest(model))
        self.module = FlatModule(model, self.layout)
        self.in_memory = self.module.same_dtype and self.module.flat.device.type == "cpu"
        if on_client and not settings.participation.known_start:
            # it is sent x: its x0 is a shape, and takes no memory
            self.x0 = torch.zeros(1, 1, 1, dtype=dtype).expand(1, 1, self.layout.size)
            if self.in_memory:
                self.module.forget()
        elif self.in_memory and (on_client or not self.here or self.layout.size >= self.large):
            self.x0 = self.module.flat.view(1, 1, -1)
            self.module.shown = True
        else:
            self.x0 = self.module.flat.detach().to(dtype, copy=True).cpu().view(1, 1, -1)
        self.weights = None
        if settings.participation.weights != "uniform" and self.here and not on_client:
            self.weights = settings.participation.shares(sizes_of(self.local_data))
        # a buffer that is not saved is a constant, such as rotary frequencies
        saved = model.state_dict().keys()
        self.tracked = [
            buffer
            for name, buffer in model.named_buffers()
            if name in saved and (buffer.is_floating_point() or name.endswith(COUNTER))
        ]
        self.buffers0 = self.read_buffers()
        self._active: Restricted | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a process that shares the clients' work is sent: all but the evaluation."""
        return vars(self) | {"tests": {}, "client_tests": None}

    @property
    def local_data(self) -> Sequence[Any]:
        """The examples of the clients that are on this machine."""
        if len(self.here) == self.clients:
            return self.client_data
        return [self.client_data[i] for i in self.here]

    @functools.cached_property
    def _sizes(self) -> Sequence[int] | None:
        """The clients' numbers of examples where they are known without reading."""
        return getattr(self.client_data, "sizes", None)

    def examples(self, client: int) -> int:
        """The number of training examples of a client."""
        return len(self.client_data[client]) if self._sizes is None else int(self._sizes[client])

    def batches_of(self, client: int) -> float:
        """Mini-batches in one pass over a client's examples."""
        if self._sizes is not None:
            return self._sizes[client] / self.batch_size
        return steps_per_epoch(self.client_data[client], self.batch_size)

    @functools.cached_property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Mini-batches in one pass over the mean client's examples."""
        if self._sizes is not None:
            return max(1, round(float(np.mean(self._sizes)) / self.batch_size))
        passes = [steps_per_epoch(data, self.batch_size) for data in self.local_data]
        return max(1, round(float(np.mean(passes or [1.0]))))

    def cohort(self, rnd: Round) -> Objective:
        """The objective of the one client in `rnd`, or of all of them as one batched computation."""
        self.release()
        if rnd.ids.size == 1:
            return TorchObjective(self, rnd, int(rnd.ids[0, 0]))
        return Cohort(self, rnd)

    @functools.cached_property
    def formulas(self) -> Chain | None:
        """The module as a chain of plain layers, whose backward pass is written by hand, with the gradient of its loss.

        None where the network or the loss is another one.
        """
        data = self.client_data[self.here[0]]
        plain = isinstance(data, Tensors) and data.flat and len(data.parts) == 2
        if not plain or self.device.type != "cpu" or not self.module.same_dtype:
            return None
        return chain_of(self.model, self.layout, self.loss, *data.parts)

    def has_formulas(self) -> bool:
        """Whether the clients of a round can be batched without autograd."""
        return self.can_batch() and self.formulas is not None

    def can_batch(self) -> bool:
        """Whether a cohort may be one batched computation, as far as can be told without trying."""
        data, stateful = self.client_data, any(True for _ in self.model.buffers())
        if stateful or self.privacy is not None or self.device.type != "cpu":
            return False
        if isinstance(data, Clients):
            tensors = self._sizes is not None  # they are known of tensors alone
        else:
            tensors = all(isinstance(one, Tensors) and one.flat for one in data)
        return tensors and len(np.unique(sizes_of(data).clip(max=self.batch_size))) == 1

    def sampling_rate(self) -> float:
        """The largest probability with which an example is in a batch, of clients on this machine."""
        return min(1.0, self.batch_size / int(sizes_of(self.local_data).min()))

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> dict[str, Numbers]:
        """Metrics of a server model; the training loss where there is no data to evaluate on."""
        self._load(x, buffers)
        found = dict[str, float]()
        for part, test in self.tests.items():
            prefix = "validation_" if part == "validation set" else ""
            found |= {prefix + name: value for name, value in test(self.model).items()}
        if not self.tests and self.here and not self.on_client:
            found["training_loss"] = float(self.training_loss(x, buffers)[0])
        if not all_finite(x):
            found["loss" if self.tests else "training_loss"] = float("nan")
        return {name: np.array([value]) for name, value in found.items()}

    def evaluate_clients(
        self,
        x: Vector | None,
        buffers: Vector | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> list[Evaluation]:
        """Metrics and summaries of a server model, or of a model by its `state_dict`, on each client's data."""
        if x is not None:
            self._load(x, buffers)
        elif weights is not None:
            self.trained(weights)
        rows: list[Evaluation] = []
        for client in self.here if self.client_tests is not None else ():
            part, test = self.client_tests(client)  # type: ignore[misc]
            summaries: dict[str, list[float]] = {}
            name = str(client) if self.names is None else self.names[client]
            about = {"client": name, "data": part, "examples": len(test.data)}
            rows.append((about | dict(test(self.model, summaries)), summaries))
        return rows

    def diverged(self, metrics: Mapping[str, Numbers]) -> npt.NDArray[np.bool_]:
        """A loss that is not finite; a weight that is not finite makes it so."""
        return ~np.isfinite(metrics.get("loss", metrics.get("training_loss", np.zeros(1))))

    def state_dict(self, x: Vector, buffers: Vector | None, run: int = 0) -> dict[str, Tensor]:
        """The module's own `state_dict` with the server's weights and statistics."""
        self._load(x, buffers)
        return {
            name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()
        }

    def trained(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        self.release()
        self.module.own()  # x itself stays what it is
        self.model.load_state_dict(weights)
        return self.model.eval()

    @torch.inference_mode()
    def training_loss(self, x: Vector, buffers: Vector | None = None) -> Numbers:
        """Mean loss in evaluation mode on a fixed sample: up to 10 clients, up to 64 examples per client."""

        def sample(size: int, of: int, stream: int) -> list[int]:
            # different numbers below `of`, the same in every call and from a stream that no run uses
            key = np.array([seeds.key(self.seeds[0], "training loss", stream)], np.uint64)
            return seeds.choose(key, of, min(size, of))[0].tolist()  # type: ignore[no-any-return]

        self._load(x, buffers)
        clients, losses = sample(SAMPLED_CLIENTS, self.clients, 0), []
        for client in clients:
            data, total = self.client_data[client], 0.0
            index = torch.tensor(sample(SAMPLED_EXAMPLES, len(data), 1 + client))
            for part in index.split(batch_size_of(data, self.batch_size)):
                batch = placed(data.take(part), self.device)
                total += len(part) * float(self.loss(self.model, batch))
            losses.append(total / len(index))
        weights = None if self.weights is None else self.weights[clients]
        return np.array([np.average(losses, weights=weights)])

    def _load(self, x: Vector, buffers: Vector | None) -> None:
        """The module with a server model, in evaluation mode."""
        self.release()
        (self.module.show if self.module.shown else self.module.load)(x)
        self.write_buffers(buffers)
        self.model.eval()

    def activate(self, x: Vector, P: LinearMap) -> Restricted:
        """The module inside x + range(Pᵀ), until `release`."""
        self.release()
        # the model is then held once, as the vector x
        alone = self.on_client or self.layout.size >= self.large
        borrow = alone and self.in_memory and P.picks
        self._active = Restricted(self.module, self.rules, x, P, borrow).__enter__()
        return self._active

    def release(self) -> None:
        """Restores the module."""
        if self._active is not None:
            self._active.__exit__()
            self._active = None

    @torch.no_grad()
    def write_buffers(self, buffers: Vector | None) -> None:
        """Sets the running statistics of the module's norms, and their counts of batches, from a flat vector."""
        if buffers is None or not self.tracked:
            return
        parts = buffers.view(-1).split([b.numel() for b in self.tracked])
        for buffer, part in zip(self.tracked, parts, strict=True):
            # counts are a weighted mean of whole numbers
            new = part if buffer.is_floating_point() else part.round()
            buffer.copy_(new.view(buffer.shape))

    def read_buffers(self) -> Vector | None:
        """The running statistics of the module's norms as a flat vector; None where it has none."""
        if not self.tracked:
            return None
        joined = torch.cat([b.detach().flatten() for b in self.tracked]).view(1, 1, -1)
        return joined if joined.is_meta else joined.cpu()
