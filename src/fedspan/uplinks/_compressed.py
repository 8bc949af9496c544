"""What uplinks with a compressor share. Both ends use C(v) as decoded, never v."""

from dataclasses import dataclass

from fedspan import Compressor, Drift, Uplink
from fedspan.compressors.topk import TopK
from fedspan.core.refusals import needs_contractive
from fedspan.core.tables import accept_choices

TENTH = TopK(k=0.1)


@dataclass(frozen=True)
class Compressed(Uplink):
    """An uplink that compresses one vector per reply."""

    compressor: Compressor = TENTH  # C: how uploads are compressed

    def __post_init__(self) -> None:
        accept_choices(self)

    def check(self, n: int, drift: Drift) -> None:
        needs_contractive("uplink", self.compressor, n)
