"""fedspan: train one model over many parties whose data differ, sending r numbers where others send d.

The names below are loaded when they are first used, so that `import fedspan` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedspan.core.errors import FedspanError as FedspanError
    from fedspan.core.method import Method as Method
    from fedspan.core.method import Round as Round
    from fedspan.core.objective import Objective as Objective
    from fedspan.core.projector import Projector as Projector
    from fedspan.core.registry import register as register
    from fedspan.experiment import Result as Result
    from fedspan.experiment import Spec as Spec
    from fedspan.experiment import run as run

__version__ = "0.1.0"

_WHERE = {
    "FedspanError": "fedspan.core.errors",
    "Method": "fedspan.core.method",
    "Round": "fedspan.core.method",
    "Objective": "fedspan.core.objective",
    "Projector": "fedspan.core.projector",
    "register": "fedspan.core.registry",
    "Result": "fedspan.experiment",
    "Spec": "fedspan.experiment",
    "run": "fedspan.experiment",
}
__all__ = ["FedspanError", "Method", "Objective", "Projector", "Result", "Round", "Spec", "register", "run"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fedspan' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
