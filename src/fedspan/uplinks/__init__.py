"""Uplinks, one file each; the file's name is the name in a spec. A compressor stands for `Code` of it."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.uplinks.code import Code as Code
    from fedspan.uplinks.ef21 import EF21 as EF21
    from fedspan.uplinks.feedback import Feedback as Feedback
    from fedspan.uplinks.plain import Plain as Plain
    from fedspan.uplinks.running_mean import RunningMean as RunningMean
    from fedspan.uplinks.sign_momentum import SignMomentum as SignMomentum
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
