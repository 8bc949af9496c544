"""How a data set is divided among clients, one file per partition."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.core.partition import Partition as Partition
    from fedspan.data.partitions.classes import Classes as Classes
    from fedspan.data.partitions.dirichlet import Dirichlet as Dirichlet
    from fedspan.data.partitions.iid import IID as IID
    from fedspan.data.partitions.natural import Natural as Natural
    from fedspan.data.partitions.quantity import Quantity as Quantity
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
