"""Client memory as a third cost beside rounds and bytes: the peak of one local step of a spec.

It is computed by a dry run (`fedspan.costs`), not measured. Neither the step size nor the number of steps changes it,
so all points of a grid share one dry run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from fedspan.core.errors import FedspanError
from fedspan.core.spec import Spec
from fedspan.study.preview import network

WORDS = (
    "Client memory is the peak of one local step with the largest batch. It is computed by a dry run on tensors "
    "without data, as in `fedspan plan --model`; steps of FedIT and FFA-LoRA are those of PEFT's adapters. "
    "What a client keeps between rounds is not included."
)


def client_memory(table: dict[str, Any]) -> int | None:
    """Bytes at the peak of one local step; None if the task has no network, or its data is not here."""
    if "task" not in table:
        return None
    try:
        spec = Spec.from_table(table)
    except (FedspanError, OSError, ImportError):  # a plugin's method or task
        return None
    method: Any = dataclasses.replace(spec.method, lr=1.0, local_steps=1)  # type: ignore[type-var]
    alike = dataclasses.replace(spec, rounds=1, eval_every=1, epochs=None, method=method)
    return _peak(json.dumps(alike.table()))  # in its own order: of ranks by layer, the first match counts


@functools.lru_cache(maxsize=256)
def _peak(told: str) -> int | None:
    spec = Spec.from_table(json.loads(told))
    try:
        found = network(spec)
        if found is None:
            return None
        from fedspan.costs.client_memory import memory

        return memory(spec.method, found).peak
    except (FedspanError, OSError, ImportError):  # data that is not here, or PEFT
        return None
    except (RuntimeError, ValueError):  # a layer that does not run without data, or that PEFT has no adapter for
        return None
