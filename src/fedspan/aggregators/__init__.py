"""Ways to combine the replies of a round, one file each; the file's name is the name in a spec."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.aggregators.centered_clipping import CenteredClipping as CenteredClipping
    from fedspan.aggregators.geometric_median import GeometricMedian as GeometricMedian
    from fedspan.aggregators.krum import Krum as Krum
    from fedspan.aggregators.mean import Mean as Mean
    from fedspan.aggregators.median import Median as Median
    from fedspan.aggregators.norm_bound import NormBound as NormBound
    from fedspan.aggregators.trimmed_mean import TrimmedMean as TrimmedMean
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
