"""Downlinks, one file each; the file's name is the name in a spec. A compressor stands for `Coded` with it."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.downlinks.changes import Changes as Changes
    from fedspan.downlinks.coded import Coded as Coded
    from fedspan.downlinks.full import FullModel as FullModel
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
