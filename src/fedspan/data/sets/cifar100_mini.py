"""The first 50 training and 10 test images of each class of CIFAR-100, cut from it when they are read."""

from __future__ import annotations

from fedspan.data.sets import DataSet
from fedspan.data.sets.cifar100 import SET as CIFAR100

SET = DataSet(
    name="cifar100_mini",
    about="the first 50 training and 10 test images of each class of CIFAR-100",
    clients=CIFAR100.clients,
    licence=CIFAR100.licence,
    source=CIFAR100.source,
    size=0,
    made=("cifar100_mini.npz",),
    part_of="cifar100",
)
