"""Settings of privacy: differential privacy, secure aggregation, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedspan.core.errors import (
    SpecError,
    below_one,
    not_negative,
    number,
    positive,
    positive_share,
    shown,
    true_or_false,
)

FORMATS: dict[int, tuple[float, float]] = {
    32: (2.0**20, 8.0),
    64: (2.0**36, 1024.0),
}  # bits → (scale, range)
LEAST = 3  # clients of a secure sum: a sum of two is no secret between them


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy of what a run releases, and secure aggregation of the replies; or one of them.

    With `clip`, clients take part by secret coins of the server, each with probability q = `clients_per_round` / N.
    What a client sends is scaled down to the norm `clip`, and Gaussian noise is added to the sum. With `secure`, the
    server learns the sum of a round's replies and no single one.

    With level "example" each client adds noise to its own local gradients instead: all that it sends protects each of
    its examples, from the server as well.

    Args:
        level: `"client"` protects a client with all of its data, `"example"` each example of a client.
        clip: C, the largest norm of all that a client sends in a round; inside a subspace these are its r numbers.
            With `quantile` the value of the first round. At level "example" the largest norm of the gradient of one
            example, inside a subspace that of P∇f. None leaves out differential privacy.
        noise: σ, the noise multiplier: each number of the sum gets noise of standard deviation σ C. Give this or
            `epsilon`; at level "example" this.
        epsilon: ε that the whole run may spend; the noise is solved for it from rounds, q and `delta`.
        delta: δ, well below 1/N.
        quantile: Adapts the clip to this quantile of the clients' norms, such as 0.5 (Andrew et al. 2021). None keeps
            `clip`.
        leak: λ: controls shrink by 1 − λ per round at the server and at all clients, so that noise does not pile up
            in the difference between the server's control and the mean of the clients'.
        secure: Adds the replies of a round up by secure aggregation, so that the server learns their sum only.
        secure_threshold: Share of a round's clients that must stay to the end of it, above 1/2. With fewer the round
            changes nothing; as many clients must collude with the server to open a reply.
        secure_bits: Bits of a number in a masked reply, 32 or 64.
        secure_scale: Whole numbers per unit to which replies are rounded. None takes 2^20 for 32 bits, 2^36 for 64.
        secure_range: Largest absolute value in a reply, to which others are clipped. None takes 8 for 32 bits, 1024
            for 64.
        secure_signed: Lets clients sign their keys and check those of the others against a list of their own, so that
            the server cannot pose as a client.
    """

    clip: float | None = None
    level: Literal["client", "example"] = "client"
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    quantile: float | None = None
    leak: float = 0.0
    secure: bool = False
    secure_threshold: float = 2 / 3
    secure_bits: Literal[32, 64] = 32
    secure_scale: float | None = None
    secure_range: float | None = None
    secure_signed: bool = False

    def __post_init__(self) -> None:
        true_or_false("secure", self.secure)
        if self.level not in ("client", "example"):
            raise SpecError(
                "`level` must be 'client', which protects all data of a client, or 'example', which protects one row, "
                f"got {shown(self.level)}"
            )
        given = [name for name in ("noise", "epsilon", "quantile", "leak") if getattr(self, name)]
        if self.clip is not None:
            self._check_noise()
        elif not self.secure:
            raise SpecError("`privacy` needs `clip` with `epsilon` or `noise`, or secure = true")
        elif given:
            raise SpecError(
                f"`{given[0]}` is of differential privacy, which needs `clip`; give one, or leave it out"
            )
        true_or_false("secure_signed", self.secure_signed)
        positive_share("secure_threshold", self.secure_threshold)
        if self.secure_threshold <= 0.5:
            raise SpecError(
                f"`secure_threshold` must be above 0.5, or two halves of a round could be asked for both parts of one "
                f"client's mask; got {shown(self.secure_threshold)}"
            )
        if self.secure_bits not in FORMATS:
            raise SpecError(f"`secure_bits` must be 32 or 64, got {shown(self.secure_bits)}")
        positive("secure_scale", self.fixed_scale)
        positive("secure_range", self.fixed_range)
        if self.fixed_scale * self.fixed_range >= 2**53:
            raise SpecError(
                f"`secure_scale` {self.fixed_scale:g} times `secure_range` {self.fixed_range:g} is above 2^53, beyond "
                "which whole numbers are not exact; lower one of them"
            )

    def _check_noise(self) -> None:
        positive("clip", self.clip)
        if (self.noise is None) == (self.epsilon is None):
            given = "neither" if self.noise is None else "both"
            raise SpecError(
                f"`privacy` needs `epsilon` or `noise`, got {given}; give one, such as epsilon = 8"
            )
        if self.epsilon is None:
            not_negative("noise", self.noise)
        else:
            positive("epsilon", self.epsilon)
        for name in ("delta", "quantile"):
            share = getattr(self, name)
            if share is not None and not 0 < number(name, share) < 1:
                raise SpecError(f"`{name}` must be above 0 and below 1, got {shown(share)}")
        below_one("leak", self.leak)
        if self.level == "client":
            return
        if self.epsilon is not None:
            raise SpecError(
                f"`epsilon` {self.epsilon!r} cannot be solved for at level 'example', where each client has its own; "
                "give `noise`, and find ε in the history"
            )
        for name in ("quantile", "leak"):
            if value := getattr(self, name):
                raise SpecError(f"`{name}` {value!r} is for level 'client'; leave it out")

    @property
    def fixed_scale(self) -> float:
        """`secure_scale`, or that of the bits."""
        return FORMATS[self.secure_bits][0] if self.secure_scale is None else self.secure_scale

    @property
    def fixed_range(self) -> float:
        """`secure_range`, or that of the bits."""
        return FORMATS[self.secure_bits][1] if self.secure_range is None else self.secure_range

    def survivors(self, clients: int) -> int:
        """How many of a round's clients must stay to its end."""
        return max(LEAST, clients // 2 + 1, math.ceil(self.secure_threshold * clients - 1e-9))
