"""Ways to send a vector in fewer bytes, one file each; the file's name is the name in a spec."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.compressors.compose import Compose as Compose
    from fedspan.compressors.identity import Identity as Identity
    from fedspan.compressors.qsgd import QSGD as QSGD
    from fedspan.compressors.randk import RandK as RandK
    from fedspan.compressors.sign import Sign as Sign
    from fedspan.compressors.topk import TopK as TopK
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
