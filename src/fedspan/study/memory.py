"""Client memory as a third cost beside rounds and bytes: the peak of one local step of each spec that is shown.

It is rehearsed and not measured (`hub.memory`). Neither the step size nor how many steps there are matters to it, so
that all points of a grid share one rehearsal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from fedspan.api import spec as experiment
from fedspan.api.spec import Spec
from fedspan.core.errors import FedspanError

WORDS = (
    "Client memory is what a client holds at the peak of one local step with the largest batch, rehearsed on tensors "
    "without numbers as `fedspan plan --model` does it; FedIT's and FFA-LoRA's steps are those of PEFT's adapters. "
    "What is kept between rounds is not in it."
)


def client_memory(table: dict[str, Any]) -> int | None:
    """Bytes in a client's memory at the peak of one local step; None where there is no network, or none is at hand."""
    if "task" not in table:
        return None
    try:
        spec = Spec.from_table(table)
    except (FedspanError, OSError, ImportError):  # a method or a task of the user's
        return None
    method: Any = dataclasses.replace(spec.method, lr=1.0, local_steps=1)  # type: ignore[type-var]
    alike = dataclasses.replace(spec, rounds=1, eval_every=1, epochs=None, lr_from=None, method=method)
    return _peak(json.dumps(alike.table()))  # in its own order: of the ranks by layer the first that matches counts


@functools.lru_cache(maxsize=256)
def _peak(told: str) -> int | None:
    spec = Spec.from_table(json.loads(told))
    try:
        network = experiment.sketch(spec)
        if network is None:
            return None
        from fedspan.costs.client_memory import memory

        return memory(spec.method, network).peak
    except (FedspanError, OSError, ImportError):  # data that is not here, or PEFT
        return None
    except (RuntimeError, ValueError):  # a layer that does not run without numbers, or that PEFT has no adapter for
        return None
