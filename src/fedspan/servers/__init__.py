"""Server rules, one file each; the file's name is the name in a spec. The default is `mean`."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.servers.adagrad import Adagrad as Adagrad
    from fedspan.servers.adam import Adam as Adam
    from fedspan.servers.decay import Decay as Decay
    from fedspan.servers.fedexp import FedExP as FedExP
    from fedspan.servers.mean import Mean as Mean
    from fedspan.servers.momentum import Momentum as Momentum
    from fedspan.servers.yogi import Yogi as Yogi
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
