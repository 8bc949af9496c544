"""Real numbers as whole ones modulo 2^bits, so that a sum of masked numbers is exact.

A number v is sent as round(v · scale), to the nearest, after it was clipped to ±range. The sum over n clients cannot
overflow while n · range · scale < 2^(bits − 1). With differential privacy clipped values are not counted: the count
would tell of the data. Numbers are then rounded toward zero, so that no reply exceeds its norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle, Ranges
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.layout import Vector
from fedspan.core.privacy import Privacy

CHANGE = "buffers"  # the name of the change of the buffers among the arrays of a reply
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.unsignedinteger[Any]]  # modulo 2^32 or 2^64


@dataclass(frozen=True)
class FixedPoint:
    """How numbers are rounded, and how many clients may add theirs."""

    bits: int
    scale: float  # whole numbers per unit
    range: float  # largest absolute value; what lies outside is clipped
    private: bool = False  # whether replies have a norm that rounding must not enlarge

    @staticmethod
    def of(privacy: Privacy) -> FixedPoint:
        """The format that the settings name."""
        return FixedPoint(
            privacy.secure_bits,
            privacy.fixed_scale,
            privacy.fixed_range,
            private=privacy.clip is not None,
        )

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
        return np.dtype(np.uint32 if self.bits == 32 else np.uint64)

    def encode(self, values: Floats) -> tuple[Numbers, int]:
        """(whole numbers modulo 2^bits, how many values were clipped)."""
        if not np.isfinite(values).all():
            raise ProtocolError("the reply has values that are not finite")
        limit = np.floor(self.range * self.scale)
        whole = (np.trunc if self.private else np.rint)(values * self.scale)
        clipped = 0 if self.private else int((np.abs(whole) > limit).sum())
        return np.clip(whole, -limit, limit, out=whole).astype(np.int64).astype(self.dtype), clipped

    def decode(self, total: Numbers) -> Floats:
        """A sum of encoded numbers as real ones."""
        return self.signed(total).astype(np.float64) / self.scale

    def signed(self, total: Numbers) -> npt.NDArray[np.signedinteger[Any]]:
        """Whole numbers modulo 2^bits as those nearest to zero."""
        return total.view(np.int32 if self.bits == 32 else np.int64)


@dataclass(frozen=True)
class Payload:
    """The arrays of a reply as one vector of whole numbers; the last one counts values that were clipped.

    Statistics have a range of their own, which is spread over that of the whole numbers, and every client counts once.
    """

    fixed: FixedPoint
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each array
    statistics: dict[str, Ranges]  # which of them are statistics

    @staticmethod
    def of(fixed: FixedPoint, arrays: wire.Arrays, statistics: Mapping[str, Ranges]) -> Payload:
        """For arrays of these names, shapes and types. Numbers do not matter."""
        for name, array in arrays.items():
            if not array.is_floating_point():
                raise SpecError(
                    f"a secure sum adds real numbers, and {name!r} of the reply is of type {array.dtype}"
                )
        shapes = {name: (tuple(array.shape), array.dtype) for name, array in arrays.items()}
        return Payload(fixed, shapes, dict(statistics))

    @property
    def length(self) -> int:
        """Whole numbers of the vector."""
        return 1 + sum(int(np.prod(shape)) for shape, _ in self.shapes.values())

    def encode(self, arrays: wire.Arrays, factor: float = 1.0) -> tuple[Numbers, wire.Arrays]:
        """(the vector of a reply times the client's weight, the reply as it counts in the sum)."""
        flat = np.concatenate([arrays[name].reshape(-1).double().numpy() for name in self.shapes])
        factors = self._factors(factor, 1)
        whole, clipped = self.fixed.encode(flat * factors)
        count = min(clipped, int(self.fixed.range * self.fixed.scale))
        return np.append(whole, self.fixed.dtype.type(count)), self._arrays(
            self.fixed.decode(whole) / factors
        )

    def decode(self, total: Numbers, factors: float, clients: int) -> tuple[wire.Arrays, int]:
        """(the mean of the replies of clients whose weights sum to `factors`, how many values were clipped)."""
        clipped = int(self.fixed.signed(total)[-1])
        return self._arrays(
            self.fixed.decode(total[:-1]) / self._factors(factors, clients)
        ), clipped

    def _factors(self, factor: float, clients: int) -> Floats | float:
        """What the numbers of a sum over clients are multiplied by; `factor` for all where there are no statistics."""
        if not self.statistics.keys() & self.shapes.keys():
            return factor
        fixed, parts = self.fixed, []
        for name, (shape, _) in self.shapes.items():
            own = np.full(int(np.prod(shape)), factor)
            for place, ends in enumerate(self.statistics.get(name, ())):
                own[place] = (
                    clients
                    * np.floor(fixed.range * fixed.scale)
                    / fixed.scale
                    / max(map(abs, ends))
                )
            parts.append(own)
        return np.concatenate(parts)

    def _arrays(self, flat: Floats) -> wire.Arrays:
        arrays, start = {}, 0
        for name, (shape, dtype) in self.shapes.items():
            size = int(np.prod(shape))
            arrays[name] = torch.from_numpy(flat[start : start + size]).to(dtype).reshape(shape)
            start += size
        return arrays


class FixedPointMean(NamedTuple):
    """The replies of a cohort as a secure sum counts them."""

    counted: Any  # each of them, rounded
    mean: Any
    change: Vector | None  # the mean change of the buffers
    clipped: int  # values of all replies
    length: int  # whole numbers of a reply


def fixed_point_mean(
    privacy: Privacy,
    up: Bundle,
    statistics: Mapping[str, Ranges],
    change: Vector | None,
    examples: npt.NDArray[np.int64],
) -> FixedPointMean:
    """The mean of replies, (runs, S, n), by (runs, S) numbers of examples: what secure aggregation comes to."""
    arrays, (runs, cohort) = (
        wire.pack(up) | ({} if change is None else {CHANGE: change}),
        examples.shape,
    )
    arrays = {name: array.expand(runs, cohort, -1) for name, array in arrays.items()}
    one = {name: array[:1, :1] for name, array in arrays.items()}
    payload = Payload.of(FixedPoint.of(privacy), one, statistics)
    counted = {name: torch.empty_like(array) for name, array in arrays.items()}
    means, clipped = [], 0
    for run in range(runs):
        factors = shares_of(dict(enumerate(examples[run].tolist())))
        total = np.zeros(payload.length, payload.fixed.dtype)
        for place in range(cohort):
            own = {name: array[run, place][None, None] for name, array in arrays.items()}
            numbers, read = payload.encode(own, factors[place])
            total += numbers
            for name, array in read.items():
                counted[name][run, place] = array[0, 0]
        mean, count = payload.decode(total, float(np.sum([*factors.values()])), cohort)
        means.append(mean)
        clipped += count
    counted.pop(CHANGE, None)
    joined = {name: torch.cat([mean[name] for mean in means]) for name in arrays}
    changed = joined.pop(CHANGE, None)
    return FixedPointMean(
        wire.unpack(counted), wire.unpack(joined), changed, clipped, payload.length
    )


def shares_of(examples: Mapping[int, int]) -> dict[int, float]:
    """How much each client of a sum counts, by numbers of examples; 1 on average."""
    total = sum(examples.values())
    return {client: count * len(examples) / total for client, count in examples.items()}


def clipped_values(count: int, privacy: Privacy) -> str:
    """The event of a round in which numbers were clipped."""
    more = ", or set `privacy.secure_bits` to 64" if privacy.secure_bits == 32 else ""
    return f"{count:,} numbers were clipped to ±{privacy.fixed_range:g}; raise `privacy.secure_range`{more}"
