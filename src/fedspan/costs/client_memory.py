"""What a client's memory holds at the peak of one local step of a method, by rehearsal without numbers.

    inside a subspace    ssf, subavg, fedsub: with their projector and rank
    adapters             fedit, ffalora: those of PEFT, of the method's own ranks, on the layers that SSF would cover
    whole, and c − c_i   scaffold, scallion, scafcom
    whole                all others

The simulator's own `fedit` forms a full gradient and multiplies it down: it is about what travels. A client that runs
it for its memory's sake runs PEFT, so PEFT is what is rehearsed. What a method keeps between rounds is not counted.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from fedspan.core.optimizer import Optimizer
from fedspan.costs import memory as footprint
from fedspan.costs.lora import lora
from fedspan.costs.memory import Client, Memory, OptimizerName
from fedspan.costs.sketch import Sketch
from fedspan.methods._controlled import Controlled
from fedspan.methods._lora import Adapted
from fedspan.methods.base import InSubspace
from fedspan.methods.ffalora import FFALoRA
from fedspan.methods.scaffold import Scaffold
from fedspan.methods.subavg import SubAvg
from fedspan.nn.module import Loss
from fedspan.nn.projection_rules import layout_of
from fedspan.optimizers.sgd import SGD

MANY = 1000  # numbers, by which an optimizer's memory is told from what it keeps beside


def memory(method: Method[Any, Any, Any, Any], sketch: Sketch) -> Memory:
    """The memory of one local step of a method on a network."""

    def make(model: nn.Module) -> Client:
        batch = sketch.batch(model)
        return client(method, sketch, model, lambda m: sketch.loss(m, batch))

    return footprint.rehearsed(sketch.outline(), make)


def client(method: Method[Any, Any, Any, Any], sketch: Sketch, model: nn.Module, loss: Loss) -> Client:
    """A client of the method on the sketched model, be that real or an outline."""
    choices, optimizer = sketch.choices, kind_of(getattr(method, "solver", SGD()))
    if isinstance(method, InSubspace):
        controls = not isinstance(method, SubAvg)
        return footprint.ssf(model, loss, choices, method.projector, optimizer, sketch.recompute, controls)
    if isinstance(method, Adapted):
        blocks = zip(choices, layout_of(choices).blocks, strict=True)
        ranks = {c.layer: method.rank_of(block) for c, block in blocks if c.how == "fused"}
        trained = [c for c in choices if c.how == "fused" or method.others == "trained"]
        return lora(model, loss, trained, ranks, optimizer, freeze_a=isinstance(method, FFALoRA))
    return footprint.whole(model, loss, choices, optimizer, controls=isinstance(method, Scaffold | Controlled))


def kind_of(solver: Optimizer) -> OptimizerName:
    """The optimizer that keeps as many numbers for each that is trained."""
    kept = solver.size(MANY) // MANY
    for kind, states in footprint.STATES.items():
        if states == kept:
            return kind
    raise SpecError(f"no local step of an optimizer with {kept} numbers for each that is trained can be rehearsed")
