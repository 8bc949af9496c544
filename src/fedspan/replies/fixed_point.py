"""Real numbers as whole ones modulo 2^bits, so that a sum of masked numbers is exact.

A number v is sent as round(v · scale), to the nearest, after it was clipped to ±range. The sum over n clients cannot
overflow while n · range · scale < 2^(bits − 1). With differential privacy clipped values are not counted: the count
would tell of the data. Numbers are then rounded toward zero, so that no reply exceeds its norm.

Statistics have a range of their own, which is spread over that of the whole numbers, and every client counts once.

Sums over the clients' tables must be exact whatever their size. There a number becomes a whole one of 640 bits, in
limbs of 32 that are summed modulo 2^64 each (`to_limbs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.bundle import Ranges
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.layout import Vector
from fedspan.core.privacy import Privacy

CHANGE = "buffers"  # the name of the change of the buffers among the arrays of a reply
Numbers = npt.NDArray[np.unsignedinteger[Any]]  # modulo 2^32 or 2^64
LIMBS, LIMB, POINT = 20, 32, 448  # of a number, the bits of each, and those below 1


@dataclass(frozen=True)
class FixedPoint:
    """How the arrays of replies become whole numbers, and their sum a mean."""

    bits: int
    scale: float  # whole numbers per unit
    range: float  # largest absolute value; what lies outside is clipped
    private: bool  # whether replies have a norm that rounding must not enlarge
    statistics: Mapping[str, Ranges]  # of the method

    @staticmethod
    def of(privacy: Privacy, statistics: Mapping[str, Ranges] = {}) -> FixedPoint:
        """The format that the settings name."""
        scale, most = privacy.fixed_scale, privacy.fixed_range
        clips = privacy.clip is not None
        return FixedPoint(privacy.secure_bits, scale, most, clips, statistics)

    def check(self, clients: int) -> None:
        """Raises where the sum of so many clients could overflow."""
        if clients * self.range * self.scale >= 2 ** (self.bits - 1):
            raise SpecError(
                f"`secure_scale` {self.scale:g} and `secure_range` {self.range:g}: the sum of {clients} clients could "
                f"overflow {self.bits} bits; lower one of them{', or set `secure_bits` to 64' * (self.bits == 32)}"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers modulo 2^bits."""
        return np.dtype(f"u{self.bits // 8}")

    def encode(
        self, arrays: wire.Arrays, factor: float | Vector = 1.0
    ) -> tuple[wire.Arrays, wire.Arrays, int]:
        """(replies times their clients' weights in whole numbers, as they count in the sum, how many were clipped)."""
        limit, clipped = math.floor(self.range * self.scale), 0
        whole, counted = wire.Arrays(), wire.Arrays()
        for name, array in arrays.items():
            if not array.is_floating_point():
                raise SpecError(
                    f"a secure sum adds real numbers, and {name!r} of the reply is of type {array.dtype}"
                )
            if not torch.isfinite(array).all():
                raise ProtocolError("the reply has values that are not finite")
            unit = self._unit(name, factor)
            rounded = array.double() * unit * self.scale
            rounded = rounded.trunc_() if self.private else rounded.round_()
            if not self.private:
                clipped += int((rounded.abs() > limit).sum())
            rounded.clamp_(-limit, limit)
            whole[name] = rounded.long()
            counted[name] = (rounded / self.scale / unit).to(array.dtype)
        return whole, counted, clipped

    def mean(
        self, totals: wire.Arrays, factors: float | Vector, clients: int, like: wire.Arrays
    ) -> wire.Arrays:
        """The mean of the replies of clients whose weights sum to `factors`, from sums of whole numbers."""
        return {
            name: (total.double() / self.scale / self._unit(name, factors, clients)).to(
                like[name].dtype
            )
            for name, total in totals.items()
        }

    def _unit(self, name: str, factor: float | Vector, clients: int = 1) -> float | Vector:
        """What an array is multiplied by in a sum over clients."""
        if name not in self.statistics:
            return factor
        most = clients * math.floor(self.range * self.scale) / self.scale
        ends = [max(map(abs, ends)) for ends in self.statistics[name]]
        return most / torch.tensor(ends, dtype=torch.float64)

    def join(self, whole: wire.Arrays, clipped: int) -> Numbers:
        """One vector of the whole numbers modulo 2^bits; the last one counts values that were clipped."""
        count = torch.tensor([min(clipped, math.floor(self.range * self.scale))])
        flat = torch.cat([*(array.reshape(-1) for array in whole.values()), count])
        return flat.numpy().astype(self.dtype)

    def split(self, total: Numbers, like: wire.Arrays) -> tuple[wire.Arrays, int]:
        """(the arrays that `join` made a vector of, or a sum of such vectors, how many values were clipped)."""
        signed = torch.from_numpy(total.view(f"i{total.itemsize}")).long()
        *parts, clipped = signed.split([*(array.numel() for array in like.values()), 1])
        whole = zip(like.items(), parts, strict=True)
        return {name: part.reshape(array.shape) for (name, array), part in whole}, int(clipped)


def fixed_point_mean(
    fixed: FixedPoint, up: Any, change: Vector | None, examples: npt.NDArray[np.int64]
) -> tuple[Any, Any, Vector | None, int, int]:
    """What secure aggregation of replies, (runs, S, n), comes to, by (runs, S) numbers of examples.

    Returns:
        The replies as they count in the sum, their mean, the mean change of the buffers, how many values were clipped,
        and the whole numbers of a reply.
    """
    arrays = wire.pack(up) | ({} if change is None else {CHANGE: change})
    arrays = {name: array.expand(*examples.shape, -1) for name, array in arrays.items()}
    factors = shares_of(examples)
    whole, counted, clipped = fixed.encode(arrays, torch.from_numpy(factors).unsqueeze(-1))
    totals = {name: array.sum(1, keepdim=True) for name, array in whole.items()}
    of_all = torch.from_numpy(factors.sum(1, keepdims=True)).unsqueeze(-1)
    mean = fixed.mean(totals, of_all, examples.shape[1], arrays)
    counted.pop(CHANGE, None)
    changed, length = mean.pop(CHANGE, None), 1 + sum(one.shape[-1] for one in arrays.values())
    return wire.unpack(counted), wire.unpack(mean), changed, clipped, length


def shares_of(examples: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """How much each client of a sum counts, by (…, S) numbers of examples; 1 on average."""
    shares = examples * examples.shape[-1] / examples.sum(-1, keepdims=True)
    return np.asarray(shares, np.float64)


def clipped_values(count: int, privacy: Privacy) -> str:
    """The event of a round in which numbers were clipped."""
    more = ", or set `privacy.secure_bits` to 64" if privacy.secure_bits == 32 else ""
    return f"{count:,} numbers were clipped to ±{privacy.fixed_range:g}; raise `privacy.secure_range`{more}"


# --- Numbers of any size, for sums over tables ---


def in_limbs(privacy: Privacy) -> Privacy:
    """Return the settings of secure sums with the format of limbs, which replies need not have."""
    return replace(privacy, secure_bits=64, secure_scale=None, secure_range=None)


def to_limbs(values: Sequence[float]) -> Numbers:
    """Return numbers as limbs, without rounding if their sizes are those of `data.schema.SUMMABLE`."""
    whole = [int(Fraction(value) * 2**POINT) for value in values]
    size = LIMBS * LIMB // 8
    text = b"".join(one.to_bytes(size, "little", signed=True) for one in whole)
    return np.frombuffer(text, "<u4").astype(np.uint64)


def from_limbs(total: Numbers) -> npt.NDArray[np.float64]:
    """Return the numbers that sums of limbs stand for, each rounded once."""
    found, bits = [], LIMBS * LIMB
    for limbs in total.reshape(-1, LIMBS).tolist():
        whole = sum(limb << LIMB * place for place, limb in enumerate(limbs)) % (1 << bits)
        negative = whole >> (bits - 1)
        found.append((whole - (negative << bits)) / (1 << POINT))
    return np.array(found)
