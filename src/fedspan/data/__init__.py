"""Data sets, and how they are divided among clients: usable without a spec.

train, test = fedspan.data.mnist()
parts = fedspan.data.dirichlet(train.y, clients=20, alpha=0.1, seed=0)
clients = [(train.x[part], train.y[part]) for part in parts]
"""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.core.partition import Partition as Partition

    # data sets
    from fedspan.data.datasets import Split as Split
    from fedspan.data.datasets import banking77 as banking77
    from fedspan.data.datasets import cifar10 as cifar10
    from fedspan.data.datasets import cifar100 as cifar100
    from fedspan.data.datasets import cifar100_mini as cifar100_mini
    from fedspan.data.datasets import digits as digits
    from fedspan.data.datasets import fashion_mnist as fashion_mnist
    from fedspan.data.datasets import heart_disease as heart_disease
    from fedspan.data.datasets import mnist as mnist
    from fedspan.data.datasets import tcga_brca as tcga_brca

    # who has which examples
    from fedspan.data.divide import classes as classes
    from fedspan.data.divide import dirichlet as dirichlet
    from fedspan.data.divide import iid as iid
    from fedspan.data.divide import natural as natural
    from fedspan.data.divide import quantity as quantity

    # the same as values, for specs made in Python
    from fedspan.data.partitions.classes import Classes as Classes
    from fedspan.data.partitions.dirichlet import Dirichlet as Dirichlet
    from fedspan.data.partitions.iid import IID as IID
    from fedspan.data.partitions.natural import Natural as Natural
    from fedspan.data.partitions.quantity import Quantity as Quantity

    # tables of clients
    from fedspan.data.table_data import TableData as TableData
    from fedspan.data.table_data import tables as tables
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
