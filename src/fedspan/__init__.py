"""fedspan: train one model over many parties whose data differ, sending r numbers where others send d.

The names below are loaded when they are first used, so that `import fedspan` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedspan.api.diagnose import diagnose as diagnose
    from fedspan.api.fit import fit as fit
    from fedspan.api.run import run as run
    from fedspan.core.compressor import Compressor as Compressor
    from fedspan.core.config import Engine as Engine
    from fedspan.core.config import Participation as Participation
    from fedspan.core.config import Projection as Projection
    from fedspan.core.config import Training as Training
    from fedspan.core.encoded import Encoded as Encoded
    from fedspan.core.errors import FedspanError as FedspanError
    from fedspan.core.layout import Block as Block
    from fedspan.core.layout import Layout as Layout
    from fedspan.core.layout import Vector as Vector
    from fedspan.core.method import Method as Method
    from fedspan.core.method import Round as Round
    from fedspan.core.objective import Objective as Objective
    from fedspan.core.objective import Problem as Problem
    from fedspan.core.optimizer import Optimizer as Optimizer
    from fedspan.core.projector import Projector as Projector
    from fedspan.core.registry import register as register
    from fedspan.core.spec import Spec as Spec
    from fedspan.core.sync import Log as Log
    from fedspan.core.sync import ModelSync as ModelSync
    from fedspan.core.task import Task as Task
    from fedspan.engine.result import Result as Result
    from fedspan.engine.result import load as load
    from fedspan.huggingface.adapters import export_change as export_change
    from fedspan.huggingface.adapters import export_round as export_round
    from fedspan.huggingface.adapters import merge_adapter as merge_adapter
    from fedspan.methods.base import InSubspace as InSubspace
    from fedspan.methods.base import LocalSteps as LocalSteps
    from fedspan.methods.compressed import Compressed as Compressed
    from fedspan.methods.doublesqueeze import DoubleSqueeze as DoubleSqueeze
    from fedspan.methods.ef import EF as EF
    from fedspan.methods.ef21 import EF21 as EF21
    from fedspan.methods.fedadagrad import FedAdagrad as FedAdagrad
    from fedspan.methods.fedadam import FedAdam as FedAdam
    from fedspan.methods.fedavg import FedAvg as FedAvg
    from fedspan.methods.fedavgm import FedAvgM as FedAvgM
    from fedspan.methods.fedit import FedIT as FedIT
    from fedspan.methods.fedprox import FedProx as FedProx
    from fedspan.methods.fedsub import FedSub as FedSub
    from fedspan.methods.fedyogi import FedYogi as FedYogi
    from fedspan.methods.ffalora import FFALoRA as FFALoRA
    from fedspan.methods.powersgd import PowerSGD as PowerSGD
    from fedspan.methods.qsparse import Qsparse as Qsparse
    from fedspan.methods.scafcom import Scafcom as Scafcom
    from fedspan.methods.scaffold import Scaffold as Scaffold
    from fedspan.methods.scallion import Scallion as Scallion
    from fedspan.methods.ssf import SSF as SSF
    from fedspan.methods.subavg import SubAvg as SubAvg
    from fedspan.optimizers.adamw import AdamW as AdamW

__version__ = "0.1.0"

_WHERE = {
    "fit": "api.fit",
    "Code": "core.encoded",
    "Compressor": "core.compressor",
    "FedspanError": "core.errors",
    "Block": "core.layout",
    "Layout": "core.layout",
    "Vector": "core.layout",
    "Method": "core.method",
    "Round": "core.method",
    "Objective": "core.objective",
    "Problem": "core.objective",
    "Optimizer": "core.optimizer",
    "Projector": "core.projector",
    "register": "core.registry",
    "Catchup": "core.sync",
    "Log": "core.sync",
    "Task": "core.task",
    "export_change": "huggingface.adapters",
    "export_round": "huggingface.adapters",
    "merge_adapter": "huggingface.adapters",
    "Result": "engine.result",
    "Spec": "core.spec",
    "run": "api.run",
    "load": "engine.result",
    "diagnose": "api.diagnose",
    "Engine": "core.config",
    "Participation": "core.config",
    "Projection": "core.config",
    "Training": "core.config",
    "InSubspace": "methods.base",
    "LocalSteps": "methods.base",
    "FedAvg": "methods.fedavg",
    "FedAdagrad": "methods.fedadagrad",
    "FedAdam": "methods.fedadam",
    "FedAvgM": "methods.fedavgm",
    "FedIT": "methods.fedit",
    "FFALoRA": "methods.ffalora",
    "FedProx": "methods.fedprox",
    "FedYogi": "methods.fedyogi",
    "PowerSGD": "methods.powersgd",
    "Scaffold": "methods.scaffold",
    "SSF": "methods.ssf",
    "SubAvg": "methods.subavg",
    "Compressed": "methods.compressed",
    "DoubleSqueeze": "methods.doublesqueeze",
    "EF": "methods.ef",
    "EF21": "methods.ef21",
    "Qsparse": "methods.qsparse",
    "Scafcom": "methods.scafcom",
    "Scallion": "methods.scallion",
    "FedSub": "methods.fedsub",
    "AdamW": "optimizers.adamw",
}
__all__ = [
    "EF",
    "EF21",
    "SSF",
    "AdamW",
    "Block",
    "Catchup",
    "Code",
    "Compressed",
    "Compressor",
    "DoubleSqueeze",
    "Engine",
    "FFALoRA",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedIT",
    "FedProx",
    "FedSub",
    "FedYogi",
    "FedspanError",
    "InSubspace",
    "Layout",
    "LocalSteps",
    "Log",
    "Method",
    "Objective",
    "Optimizer",
    "Participation",
    "PowerSGD",
    "Problem",
    "Projection",
    "Projector",
    "Qsparse",
    "Result",
    "Round",
    "Scafcom",
    "Scaffold",
    "Scallion",
    "Spec",
    "SubAvg",
    "Task",
    "Training",
    "Vector",
    "diagnose",
    "export_change",
    "export_round",
    "fit",
    "load",
    "merge_adapter",
    "register",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fedspan' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedspan.{_WHERE[name]}"), name)
