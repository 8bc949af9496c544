"""Federated methods, one file each; the file's name is the name in a spec, and its docstring has the algorithm."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.methods.compressed import Compressed as Compressed
    from fedspan.methods.doublesqueeze import DoubleSqueeze as DoubleSqueeze
    from fedspan.methods.ef import EF as EF
    from fedspan.methods.ef21 import EF21 as EF21
    from fedspan.methods.fedadagrad import FedAdagrad as FedAdagrad
    from fedspan.methods.fedadam import FedAdam as FedAdam
    from fedspan.methods.fedavg import FedAvg as FedAvg
    from fedspan.methods.fedavgm import FedAvgM as FedAvgM
    from fedspan.methods.feddyn import FedDyn as FedDyn
    from fedspan.methods.fedexp import FedExP as FedExP
    from fedspan.methods.fedit import FedIT as FedIT
    from fedspan.methods.fednova import FedNova as FedNova
    from fedspan.methods.fedprox import FedProx as FedProx
    from fedspan.methods.fedsmu import FedSMU as FedSMU
    from fedspan.methods.fedsub import FedSub as FedSub
    from fedspan.methods.fedvarp import FedVARP as FedVARP
    from fedspan.methods.fedyogi import FedYogi as FedYogi
    from fedspan.methods.ffalora import FFALoRA as FFALoRA
    from fedspan.methods.mimelite import MimeLite as MimeLite
    from fedspan.methods.powersgd import PowerSGD as PowerSGD
    from fedspan.methods.qsparse import Qsparse as Qsparse
    from fedspan.methods.scafcom import Scafcom as Scafcom
    from fedspan.methods.scaffnew import Scaffnew as Scaffnew
    from fedspan.methods.scaffold import Scaffold as Scaffold
    from fedspan.methods.scallion import Scallion as Scallion
    from fedspan.methods.sparseloco import SparseLoCo as SparseLoCo
    from fedspan.methods.ssf import SSF as SSF
    from fedspan.methods.subavg import SubAvg as SubAvg
    from fedspan.methods.tamuna import Tamuna as Tamuna
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
