"""Settings of a run that are not those of a method or a task: the same words in Python and in spec files.

What everyone sets is flat (`Settings`, and `Spec` in `core.spec`). The rest is grouped in small objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from fedspan.core.aggregator import Aggregator
from fedspan.core.errors import (
    SpecError,
    at_least,
    at_most,
    items,
    not_negative,
    one_of,
    path_of,
    positive,
    positive_share,
    shown,
)
from fedspan.core.federation import Federation
from fedspan.core.layout import Floats, Ints
from fedspan.core.privacy import Privacy

Augment = Callable[[Any, torch.Generator], Any]
Weights = Literal["uniform", "examples"]
Simulate = Literal["auto", "loop", "batched", "pool"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEVICES = ("cpu", "cuda", "mps", "xpu", "meta")  # the last one for dry runs, which hold no numbers
MOST_EXAMPLES = 10**12  # of a batch
FULL_BATCH = 1 << 62  # a batch size above any client's number of examples


@dataclass(frozen=True, kw_only=True)
class Training:
    """How clients train between two exchanges.

    Args:
        weight_decay: Adds `weight_decay` times the weights to every gradient.
        clip: Largest norm of a mini-batch gradient. Inside a subspace it is that of P∇f, which is shorter than that of
            ∇f, by √ρ on average. None does not clip.
        augment: Changes to the training batches: `"flip"` or `"crop"` for images, or a function
            `(batch, generator) -> batch`.
        class_weights: Weights of the classes in the loss: a table of class → weight, of which others have 1, or
            `"balanced"`, n / (K n_k) for the n_k of the n training examples of all clients that are of class k of K.
            The loss is then the weighted mean over a batch.
        pos_weight: For yes or no: the factor of the loss of examples that are yes, as in torch's `BCEWithLogitsLoss`.
        per_client: Whether `epochs` are passes over each client's own examples, so that clients with more examples take
            more local steps. By default all take as many as the mean client.
    """

    weight_decay: float = 0.0
    clip: float | None = None
    augment: str | Augment | None = None
    class_weights: str | Mapping[str, float] | None = None
    pos_weight: float | None = None
    per_client: bool = False

    def __post_init__(self) -> None:
        not_negative("weight_decay", self.weight_decay)
        if self.pos_weight is not None:
            positive("pos_weight", self.pos_weight)
        given = self.class_weights
        if isinstance(given, Mapping):
            for name, value in given.items():
                positive(f"class_weights.{name}", value)
            object.__setattr__(self, "class_weights", {str(k): float(v) for k, v in given.items()})
        elif given not in (None, "balanced"):
            raise SpecError(
                f"`class_weights` must be 'balanced' or a table of class and weight, got {shown(given)}"
            )
        if self.clip is not None:
            positive("clip", self.clip)


@dataclass(frozen=True, kw_only=True)
class Participation:
    """How much each client counts, and how the replies of a round become one.

    Args:
        weights: `"examples"` weights client i by n_i / n, its share of all training examples: the objective is the
            mean loss over all examples. `"uniform"` gives every client the same weight, as the papers of SSF and
            SCAFFOLD do. They count in the objective, in averages and in the mean of controls.
        unbiased: How methods without controls weight the clients S of a round. By default their mean is
            Σ_S w_i v_i / Σ_S w_i, as in most code for FedAvg. It has little noise, but where weights differ and not
            all N clients take part, it is biased: FedAvg then minimizes another objective, in which large clients
            count less. With `unbiased` it is (N/S) Σ_S w_i v_i, whose expectation is Σ w_i v_i. SSF, SCAFFOLD and
            other methods with controls reach the minimum of the objective either way and do not use this.
        aggregator: What takes the place of the mean of the replies, such as `TrimmedMean(share=0.2)` or its name, so
            that hostile clients cannot move it. None is the mean.
        known_start: Whether clients hold the initial model, such as public pre-trained weights. If so,
            methods that log the model's changes send a new client only what has changed since round 0. Across machines,
            a client whose initial model differs is refused.
        screen: A reply whose norm is above `screen` times the usual one is left out, and an event says so. The usual
            norm is the largest median norm of a round so far. None lets every finite reply count.
    """

    weights: Weights = "examples"
    unbiased: bool = False
    aggregator: Aggregator | None = None
    known_start: bool = False
    screen: float | None = 100.0

    def __post_init__(self) -> None:
        from fedspan.core.tables import accept_choices  # which imports this module

        accept_choices(self)
        if self.screen is not None:
            positive("screen", self.screen)
            if self.screen < 1:
                raise SpecError(
                    f"`screen` must be at least 1, got {shown(self.screen)}; None lets every reply count"
                )

    def shares(self, counts: Ints | Floats) -> Floats | None:
        """The clients' weights, which sum to 1, by their numbers of examples; None where all are equal."""
        if self.weights == "uniform" or len(set(counts.tolist())) <= 1:
            return None
        return np.asarray(counts / counts.sum(), np.float64)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Which tensors of a torch module are trained inside the subspace.

    A name is a pattern that matches tensors ("blocks.*.weight") or modules ("head", "blocks.0").

    Args:
        project_modules: Projected although they would be sent in full.
        full_modules: Trained and sent in full.
        frozen_modules: Neither trained nor sent. None takes the task's default, which is none for most tasks.
        min_numel: Tensors with fewer numbers are sent in full.
    """

    project_modules: tuple[str, ...] = ()
    full_modules: tuple[str, ...] = ()
    frozen_modules: tuple[str, ...] | None = None
    min_numel: int = 512

    def __post_init__(self) -> None:
        for name in ("project_modules", "full_modules", "frozen_modules"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, items(name, value))
        at_least("min_numel", self.min_numel, 1)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a run is computed in one process. It decides speed, memory and disk, and no more than the last digits.

    Args:
        simulate: How the clients of a round are worked through: one after the other (`"loop"`), as one batched
            computation (`"batched"`), on several processes (`"pool"`), or by a rule that depends on the network, the
            batches and the clients alone (`"auto"`).
        workers: Processes of `"pool"`. None takes as many as torch has threads.
        states_dir: A directory for the clients' states, so that memory holds only those of one round's clients.
    """

    simulate: Simulate = "auto"
    workers: int | None = None
    states_dir: str | Path | None = None

    def __post_init__(self) -> None:
        one_of("simulate", self.simulate, get_args(Simulate))
        if self.workers is not None:
            at_least("workers", self.workers, 1)
            at_most("workers", self.workers, 10_000)
        if self.states_dir is not None:
            path_of("states_dir", self.states_dir)


@dataclass(frozen=True, kw_only=True)
class Search:
    """How `lr = "search"` finds the local step size.

    Args:
        share: The part of the run's rounds that all trials together may take.
        start: The first step size that is tried.
    """

    share: float = 0.1
    start: float = 1.0

    def __post_init__(self) -> None:
        positive("start", self.start)
        positive_share("share", self.share)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a task needs to know of a run to build its problem."""

    batch_size: int | Literal["full"] = 32
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    metrics: tuple[Any, ...] = ()
    training: Training = field(default_factory=Training)
    participation: Participation = field(default_factory=Participation)
    projection: Projection = field(default_factory=Projection)
    engine: Engine = field(default_factory=Engine)
    privacy: Privacy | None = None
    federation: Federation | None = None

    def __post_init__(self) -> None:
        from fedspan.core.tables import accept_choices, check_types  # which import this module

        several = not isinstance(self.metrics, str) and not callable(self.metrics)
        metrics = items("metrics", self.metrics) if several else (self.metrics,)
        object.__setattr__(self, "metrics", metrics)
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        accept_choices(self)
        check_types(self)
        self._device()
        if self.batch_size != "full":
            at_least("batch_size", self.batch_size, 1)
            if self.batch_size > MOST_EXAMPLES:
                raise SpecError(
                    f"`batch_size` is {shown(self.batch_size)}; write 'full' for all examples of a client"
                )

    @property
    def dp(self) -> Privacy | None:
        """The settings of differential privacy; None where there is none."""
        return self.privacy if self.privacy is not None and self.privacy.clip is not None else None

    @property
    def secure(self) -> Privacy | None:
        """The settings of secure aggregation; None where replies are sent in the open."""
        return self.privacy if self.privacy is not None and self.privacy.secure else None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the model's numbers."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """The device that local steps run on; "auto" is CUDA where it is available. Refused where torch lacks it."""
        found = self._device()
        try:
            torch.empty(0, device=found)
        except (RuntimeError, AssertionError):  # the second where torch was built without CUDA
            raise SpecError(
                f"`device` is {str(self.device)!r}, but torch finds no such device here; use 'auto' or 'cpu'"
            ) from None
        return found

    def _device(self) -> torch.device:
        """`device` as torch has it, on whatever machine."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        with contextlib.suppress(RuntimeError):
            found = torch.device(auto if self.device == "auto" else self.device)
            if found.type in DEVICES:
                return found
        raise SpecError(
            f"`device` must be 'auto', 'cpu' or a device such as 'cuda:0', got {shown(self.device)}"
        )

    @property
    def examples_per_batch(self) -> int:
        """`batch_size` as a number; a full batch is larger than any client."""
        return FULL_BATCH if self.batch_size == "full" else self.batch_size
