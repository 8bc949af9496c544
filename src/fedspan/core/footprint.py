"""What a method's local step trains on a client's device: the part of its costs that no message tells.

Bytes on the wire and states between rounds are measured on the messages and states themselves (`fedspan.costs`), and
memory by a dry run of `client_step`. So a method overrides `Method.footprint` only where the defaults are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters that a device would train with PEFT instead of forming full gradients."""

    ranks: Mapping[str, int]  # name of an adapted block → r
    train_a: bool = True  # whether A is trained as well as B
    train_others: bool = True  # whether blocks without an adapter are trained in full


@dataclass(frozen=True)
class Footprint:
    """The numbers that a client's local step is about."""

    trained: int  # numbers that the step changes
    optimizer: int = 0  # numbers that its optimizer keeps from step to step
    adapters: Adapters | None = None  # set by LoRA methods: memory is then that of PEFT's step
