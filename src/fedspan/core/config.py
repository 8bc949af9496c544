"""Settings of a run that are not those of a method or a task: the same words in Python and in spec files.

What everyone sets is flat (`Settings`, and `Spec` in `core.spec`). The rest is grouped in four small objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import SpecError, at_least, not_negative, one_of, positive

Augment = Callable[[Any, torch.Generator], Any]
Weights = Literal["uniform", "examples"]
Simulate = Literal["auto", "loop", "batched", "pool"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
FULL_BATCH = 1 << 62  # a batch size above any client's number of examples


@dataclass(frozen=True, kw_only=True)
class Training:
    """How clients train between two exchanges.

    Args:
        weight_decay: Adds `weight_decay` times the weights to every gradient.
        clip: Largest norm of a mini-batch gradient. None does not clip.
        augment: Changes to the training batches: `"flip"` or `"crop"` for images, or a function
            `(batch, generator) -> batch`.
    """

    weight_decay: float = 0.0
    clip: float | None = None
    augment: str | Augment | None = None

    def __post_init__(self) -> None:
        not_negative("weight_decay", self.weight_decay)
        if self.clip is not None:
            positive("clip", self.clip)


@dataclass(frozen=True, kw_only=True)
class Participation:
    """How much each client counts in the objective, in averages and in the mean of controls.

    Args:
        weights: `"examples"` weights client i by n_i / n, its share of all training examples, so that every method
            minimizes the mean loss over all examples. `"uniform"` gives every client the same weight, as the papers
            of SSF and SCAFFOLD do.
    """

    weights: Weights = "examples"

    def __post_init__(self) -> None:
        one_of("weights", self.weights, ("uniform", "examples"))

    def shares(self, counts: npt.NDArray[Any]) -> npt.NDArray[np.float64] | None:
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
            if isinstance(value, str):
                raise SpecError(f"`{name}` must be a list of names, got {value!r}; write [{value!r}]")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        at_least("min_numel", self.min_numel, 1)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a run is computed in one process. It decides speed, memory and disk, not results.

    Args:
        simulate: How the clients of a round are worked through: one after the other (`"loop"`), as one batched
            computation (`"batched"`), on several processes (`"pool"`), or whatever is fastest (`"auto"`).
        workers: Processes of `"pool"`. None takes as many as torch has threads.
        states_dir: A directory for the clients' states, so that memory holds only those of one round's clients.
        states_dtype: The type in which states are kept on disk. `"bfloat16"` halves the disk and rounds the states.
        compact_states: Keeps a client's state as the numbers it has sent, as long as these are fewer than the state.
        recompute: Recomputes outputs of projected layers in the backward pass instead of keeping them.
    """

    simulate: Simulate = "auto"
    workers: int | None = None
    states_dir: str | Path | None = None
    states_dtype: Literal["float32", "bfloat16"] = "float32"
    compact_states: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        one_of("simulate", self.simulate, ("auto", "loop", "batched", "pool"))
        one_of("states_dtype", self.states_dtype, ("float32", "bfloat16"))
        if self.workers is not None:
            at_least("workers", self.workers, 1)
        if self.compact_states and self.states_dir is not None:
            raise SpecError("`compact_states` keeps states in memory and `states_dir` on disk; give one of them")


@dataclass(frozen=True, kw_only=True)
class Search:
    """How `lr = "search"` finds the local step size.

    Args:
        share: The part of the run's rounds that all trials together may take.
        start: The first step size that is tried.
    """

    share: float = 0.15
    start: float = 1.0

    def __post_init__(self) -> None:
        positive("search.start", self.start)
        if not 0 < self.share <= 1:
            raise SpecError(f"`search.share` must be in (0, 1], got {self.share!r}")


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

    def __post_init__(self) -> None:
        if self.batch_size != "full":
            at_least("batch_size", self.batch_size, 1)
        one_of("dtype", self.dtype, DTYPES)
        if isinstance(self.metrics, str) or callable(self.metrics):
            object.__setattr__(self, "metrics", (self.metrics,))
        object.__setattr__(self, "metrics", tuple(self.metrics))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the model's numbers."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """The device that local steps run on; "auto" is CUDA where it is available."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            found = torch.device(auto if self.device == "auto" else self.device)
            if found.type == "cuda" and not torch.cuda.is_available():
                raise SpecError(f"`device` is {str(self.device)!r}, but torch finds no CUDA here; use 'auto' or 'cpu'")
            return found
        except RuntimeError:
            raise SpecError(
                f"`device` must be 'auto', 'cpu' or a device such as 'cuda:0', got {self.device!r}"
            ) from None

    @property
    def examples_per_batch(self) -> int:
        """`batch_size` as a number; a full batch is larger than any client."""
        return FULL_BATCH if self.batch_size == "full" else self.batch_size
