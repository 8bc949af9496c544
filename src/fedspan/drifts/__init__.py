"""Corrections of drift, one file each; the file's name is the name in a spec."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.drifts.controls import Controls as Controls
    from fedspan.drifts.dynamic import Dynamic as Dynamic
    from fedspan.drifts.none import NoDrift as NoDrift
    from fedspan.drifts.proximal import Proximal as Proximal
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
