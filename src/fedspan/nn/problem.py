"""Clients' data and a torch module as a Problem; the clients of a round share one module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedspan.core import seeds
from fedspan.core.config import Settings
from fedspan.core.errors import DataError
from fedspan.core.layout import Vector, all_finite
from fedspan.core.linear_map import LinearMap, picked
from fedspan.core.objective import Objective, Problem
from fedspan.core.round import Round
from fedspan.nn.augment import augmentation
from fedspan.nn.batched import Cohort
from fedspan.nn.chain import Chain, chain_of
from fedspan.nn.client_data import (
    ClientData,
    LocalClients,
    Loss,
    ReadLater,
    Tensors,
    placed,
    sizes_of,
)
from fedspan.nn.loaders import batch_size_of, steps_per_epoch
from fedspan.nn.loss_gradient import LossGradient, loss_gradient
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.objective import TorchObjective
from fedspan.nn.projection_rules import ProjectionRule, frozen_digest, layout_of, state_dtype

Evaluate = Callable[[nn.Module], Mapping[str, float]]
COUNTER = "num_batches_tracked"  # of BatchNorm; with momentum=None it weights the next batch
LARGE = 1 << 22  # numbers of a model that clients in one process train in the memory of x itself
SAMPLED_CLIENTS, SAMPLED_EXAMPLES = 10, 64  # of `training_loss`, per problem and per client


@dataclass(frozen=True, eq=False)
class ClientTests:
    """What each client on this machine is evaluated on."""

    data: Mapping[
        int, tuple[str, ClientData]
    ]  # client → (part: train, test or validation; its examples)
    on: Callable[[ClientData], Evaluate]


class TorchProblem(Problem):
    """A module, its clients' examples, and how the module is evaluated.

    Args:
        model: The module; it is moved to the device of the settings and trained in place.
        clients: One client's examples each, all of them or those on this machine (`LocalClients`).
        loss: `loss(model, batch)`, the mean over the examples of a batch.
        rules: What becomes of each trained tensor, from `projection_rules(model)`.
        settings: Batch size, device, clip, weight decay and so on.
        seed: Decides the mini-batches, dropout and augmentation.
        evaluate: `evaluate(model)` gives the metrics. None: there are none.
        on_client: Whether this is one client's machine, which needs no copy of the start unless the settings say so.
        names: The clients' names. None: their numbers.
        client_tests: What each client is evaluated on. None: clients are not evaluated.
    """

    cohort_mode = "per_client"
    test_examples: int | None = None  # of the test set, where there is one

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientData],
        loss: Loss,
        rules: Sequence[ProjectionRule],
        settings: Settings,
        *,
        seed: int = 0,
        evaluate: Evaluate | None = None,
        on_client: bool = False,
        names: Sequence[str] | None = None,
        client_tests: ClientTests | None = None,
    ) -> None:
        if not clients:
            raise DataError("there are no clients; give at least one")
        self.device, self.training, self.recompute = (
            settings.torch_device,
            settings.training,
            settings.engine.recompute,
        )
        self.model, self.client_data, self.loss, self.rules = (
            model.to(self.device),
            clients,
            loss,
            rules,
        )
        self.seeds, self.batch_size, self._evaluate = (seed,), settings.examples_per_batch, evaluate
        private = settings.dp is not None and settings.dp.level == "example"
        self.privacy = settings.dp if private else None  # of single examples
        self.augment = augmentation(self.training.augment)
        dtype = state_dtype(next(p.dtype for p in model.parameters() if p.requires_grad))
        self.layout = layout_of(rules, dtype, frozen_digest(model))
        self.module = FlatModule(model, self.layout)
        self.clients, self.names, self.client_tests, self.on_client = (
            len(clients),
            names,
            client_tests,
            on_client,
        )
        self.in_memory = self.module.same_dtype and self.module.flat.device.type == "cpu"
        on_server = not on_client and not self.local_data  # nothing is trained here
        if (
            on_client and not settings.participation.known_start
        ):  # it is sent x: its x0 is a shape, and takes no memory
            self.x0 = torch.zeros(1, 1, 1, dtype=dtype).expand(1, 1, self.layout.size)
            if self.in_memory:
                self.module.forget()
        elif self.in_memory and (on_server or on_client or self.layout.size >= LARGE):
            self.x0 = self.module.flat.view(1, 1, -1)
            self.module.shown = True
        else:
            self.x0 = self.module.flat.detach().to(dtype, copy=True).cpu().view(1, 1, -1)
        weighted = settings.participation.weights != "uniform"
        self.weights = (
            settings.participation.shares(sizes_of(self.local_data)) if weighted else None
        )
        saved = (
            model.state_dict().keys()
        )  # a buffer that is not saved is a constant, such as rotary frequencies
        self.tracked = [
            buffer
            for name, buffer in model.named_buffers()
            if name in saved and (buffer.is_floating_point() or name.endswith(COUNTER))
        ]
        self.buffers0 = self.read_buffers()
        self._active: Restricted | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a process that shares the clients' work is sent: all but the evaluation."""
        return vars(self) | {"_evaluate": None, "client_tests": None}

    @property
    def local_data(self) -> Sequence[ClientData]:
        """The examples of the clients that are on this machine."""
        return (
            self.client_data.here
            if isinstance(self.client_data, LocalClients)
            else self.client_data
        )

    def examples(self, client: int) -> int:
        """The number of training examples of a client."""
        known = self.client_data.sizes if isinstance(self.client_data, ReadLater) else None
        return len(self.client_data[client]) if known is None else int(known[client])

    @functools.cached_property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Mini-batches in one pass over the mean client's examples."""
        if isinstance(self.client_data, ReadLater) and self.client_data.sizes is not None:
            return max(1, round(float(np.mean(self.client_data.sizes)) / self.batch_size))
        passes = [steps_per_epoch(data, self.batch_size) for data in self.local_data]
        return max(1, round(float(np.mean(passes)))) if passes else 1

    def cohort(self, rnd: Round) -> Objective:
        """The objective of the one client in `rnd`, or of all of them as one batched computation."""
        self.release()
        return (
            TorchObjective(self, rnd, int(rnd.ids[0, 0]))
            if rnd.ids.size == 1
            else Cohort(self, rnd)
        )

    @functools.cached_property
    def formulas(self) -> tuple[Chain, LossGradient] | None:
        """The module as a chain of plain layers, whose backward pass is written by hand, and the gradient of its loss.

        None where the network or the loss is another one.
        """
        data = self.local_data[0]
        if not isinstance(data, Tensors) or len(data.parts) != 2 or self.device.type != "cpu":
            return None
        inputs, targets = data.parts
        chain = (
            chain_of(self.model, self.layout, inputs.dim() - 1) if self.module.same_dtype else None
        )
        loss = None if chain is None else loss_gradient(self.loss)
        if chain is None or loss is None or not loss.fits(targets.unsqueeze(0), chain.width):
            return None
        return chain, loss

    def has_formulas(self) -> bool:
        """Whether the clients of a round can be batched without autograd."""
        return self.can_batch() and self.formulas is not None

    def can_batch(self) -> bool:
        """Whether a cohort may be one batched computation, as far as can be told without trying."""
        if (
            any(True for _ in self.model.buffers())
            or self.device.type != "cpu"
            or self.privacy is not None
        ):
            return False
        if isinstance(self.client_data, ReadLater):  # sizes are known of tensors alone
            tensors = self.client_data.sizes is not None
        else:
            tensors = all(isinstance(data, Tensors) for data in self.client_data)
        return (
            tensors and len(np.unique(np.minimum(sizes_of(self.client_data), self.batch_size))) == 1
        )

    @property
    def has_test_data(self) -> bool:
        """Whether the server's model is evaluated on data of its own."""
        return self._evaluate is not None

    def sampling_rate(self) -> float:
        """The largest probability with which an example is in a batch, of clients on this machine."""
        return min(1.0, self.batch_size / int(sizes_of(self.local_data).min()))

    def evaluate(
        self, x: Vector, buffers: Vector | None = None
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Metrics of a server model; the training loss where there is no data to evaluate on."""
        self._load(x, buffers)
        with torch.inference_mode():
            found = dict(self._evaluate(self.model)) if self._evaluate is not None else {}
        if self._evaluate is None and self.local_data and not self.on_client:
            found["training_loss"] = float(self.training_loss(x, buffers)[0])
        if not all_finite(x):
            found["training_loss" if self._evaluate is None else "loss"] = float("nan")
        return {name: np.array([value]) for name, value in found.items()}

    def evaluate_clients(self, x: Vector, buffers: Vector | None = None) -> list[dict[str, Any]]:
        """Metrics of a server model on each client's data, one row per client."""
        self._load(x, buffers)
        return self._client_rows()

    def evaluate_kept(self, weights: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """The same of a model by its `state_dict`."""
        self.trained(weights)
        return self._client_rows()

    def _client_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if self.client_tests is None:
            return rows
        with torch.inference_mode():
            for client, (part, data) in self.client_tests.data.items():
                name = str(client) if self.names is None else self.names[client]
                found = self.client_tests.on(data)(self.model)
                rows.append({"client": name, "data": part, "examples": len(data), **found})
        return rows

    def diverged(self, metrics: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
        """A loss that is not finite; a weight that is not finite makes it so."""
        return ~np.isfinite(metrics.get("loss", metrics.get("training_loss", np.zeros(1))))

    def state_dict(
        self, x: Vector, buffers: Vector | None, run: int = 0
    ) -> dict[str, torch.Tensor]:
        """The module's own `state_dict` with the server's weights and statistics."""
        self._load(x, buffers)
        return {
            name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()
        }

    def trained(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        self.release()
        self.module.own()  # x itself stays what it is
        self.model.load_state_dict(weights)
        return self.model.eval()

    def training_loss(self, x: Vector, buffers: Vector | None = None) -> npt.NDArray[np.float64]:
        """Mean loss in evaluation mode on a fixed sample: up to 10 clients, up to 64 examples per client."""
        self._load(x, buffers)
        clients = self._sample(SAMPLED_CLIENTS, self.clients, 0)
        with torch.inference_mode():
            losses = [self._sampled_loss(client) for client in clients]
        return np.array(
            [np.average(losses, weights=None if self.weights is None else self.weights[clients])]
        )

    def _sampled_loss(self, client: int) -> float:
        source = self.client_data[client]
        index = torch.tensor(self._sample(SAMPLED_EXAMPLES, len(source), 1 + client))
        parts = [
            (len(part), placed(source.take(part), self.device))
            for part in index.split(batch_size_of(source, self.batch_size))
        ]
        return sum(n * float(self.loss(self.model, batch)) for n, batch in parts) / len(index)

    def _sample(self, size: int, of: int, stream: int) -> list[int]:
        """Different numbers below `of`, the same in every call and from a stream that no run uses."""
        key = np.array([seeds.key(self.seeds[0], "training loss", stream)], np.uint64)
        chosen: list[int] = seeds.choose(key, of, min(size, of))[0].tolist()
        return chosen

    def _load(self, x: Vector, buffers: Vector | None) -> None:
        """The module with a server model, in evaluation mode."""
        self.release()
        if self.module.shown:
            self.module.show(x)
        else:
            self.module.load(x)
        self.write_buffers(buffers)
        self.model.eval()

    def activate(self, x: Vector, P: LinearMap) -> Restricted:
        """The module inside x + range(Pᵀ), until `release`."""
        self.release()
        picks = all(factor is None or picked(factor) is not None for factor in P.factors)
        alone = (
            self.on_client or self.layout.size >= LARGE
        )  # the model is then held once, as the vector x
        borrow = alone and self.in_memory and picks
        self._active = Restricted(self.module, self.rules, x, P, self.recompute, borrow).__enter__()
        return self._active

    def release(self) -> None:
        """Restores the module."""
        if self._active is not None:
            self._active.__exit__()
            self._active = None

    def write_buffers(self, buffers: Vector | None) -> None:
        """Sets the running statistics of the module's norms, and their counts of batches, from a flat vector."""
        if buffers is None or not self.tracked:
            return
        parts = buffers.view(-1).split([b.numel() for b in self.tracked])
        with torch.no_grad():
            for buffer, part in zip(self.tracked, parts, strict=True):
                new = part.view(buffer.shape)
                buffer.copy_(
                    new if buffer.is_floating_point() else new.round()
                )  # a weighted mean of whole numbers

    def read_buffers(self) -> Vector | None:
        """The running statistics of the module's norms as a flat vector; None where it has none."""
        if not self.tracked:
            return None
        return torch.cat(
            [
                b.detach().reshape(-1).to("meta" if self.module.flat.is_meta else "cpu")
                for b in self.tracked
            ]
        ).view(1, 1, -1)
