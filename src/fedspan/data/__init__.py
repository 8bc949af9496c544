"""Data sets by name, and how they are divided among clients: usable without a spec.

train, test = fedspan.data.load("mnist")
parts = fedspan.data.Dirichlet(clients=20, alpha=0.1).split(train.y, seed=0)
clients = [(train.x[part], train.y[part]) for part in parts]
"""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.core.partition import Partition as Partition
    from fedspan.data.datasets import Split as Split
    from fedspan.data.datasets import load as load
    from fedspan.data.partitions.classes import Classes as Classes
    from fedspan.data.partitions.dirichlet import Dirichlet as Dirichlet
    from fedspan.data.partitions.iid import IID as IID
    from fedspan.data.partitions.natural import Natural as Natural
    from fedspan.data.partitions.quantity import Quantity as Quantity
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
