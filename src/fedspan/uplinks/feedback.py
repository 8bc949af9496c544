"""Error feedback: what compression left out is added to the next upload (Stich et al. 2018, arXiv:1809.07599).

    w ← v + β P e_i;   q ← C(w), sent;   P e_i ← w − q             outside the subspace e_i stays

C must be contractive, as top-k is. With β < 1 old errors fade, and e_i is a momentum of what C leaves out, as in
SparseLoCo. e_i follows from the client's data: no server can keep a copy of it, and a client that loses it continues
from zero.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, LinearMap, Parts, Vector, register
from fedspan.core.errors import positive_share
from fedspan.uplinks._compressed import Compressed


@register
@dataclass(frozen=True)
class Feedback(Compressed):
    """Compression in which nothing is lost for ever."""

    decay: float = 1.0  # β: what is left of an error until the next upload
    private = ("e",)
    needs_no_controls = "controls already remember what C leaves out, which would then count twice; use uplink = 'code'"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_share("decay", self.decay)

    def init_client(self, x0: Vector) -> Parts:
        return {"e": torch.zeros_like(x0)}

    def send(self, v: Vector, client: Bundle, P: LinearMap) -> tuple[Vector, Parts]:
        e = P @ client.e
        w = (e if self.decay == 1 else self.decay * e) + v
        return w, {"e": P.T.put(w, client.e)}

    def after(self, client: Bundle, v: Vector, P: LinearMap) -> Parts:
        return {"e": P.T.plus(v, client.e, sign=-1)}
