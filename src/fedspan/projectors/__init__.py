"""Random subspaces, one file per kind; the file's name is the name in a spec."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.projectors.coordinate import Coordinate as Coordinate
    from fedspan.projectors.cycle import Cycle as Cycle
    from fedspan.projectors.gaussian import Gaussian as Gaussian
    from fedspan.projectors.hadamard import Hadamard as Hadamard
    from fedspan.projectors.identity import Identity as Identity
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
