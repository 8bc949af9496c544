"""Which runs a secure sum can serve; any other one is refused before it begins."""

from __future__ import annotations

from fedspan.core.errors import SpecError
from fedspan.core.extras import needs
from fedspan.core.method import Method, is_plain_sum
from fedspan.core.privacy import LEAST
from fedspan.core.registry import name_of
from fedspan.core.spec import Spec


def check_secure(spec: Spec, method: Method, clients: int, clients_per_round: int) -> None:
    """Raises where the server would need single replies, or where a sum of so few clients hides nobody."""
    needs("privacy", "cryptography")
    from fedspan.privacy.secure_numbers import FixedPoint  # needs the library

    if not is_plain_sum(method):
        raise SpecError(
            f"`privacy.secure` gives the server the sum of the replies only, and {name_of(method)} needs each reply; "
            "leave out a coded `uplink` and server = 'fedexp', or use a method such as ssf, subavg, scaffold or fedavg"
        )
    aggregator = spec.participation.aggregator
    if aggregator is not None and name_of(aggregator) != "mean":
        raise SpecError(
            f"`participation.aggregator` {name_of(aggregator)!r} needs single replies, which `privacy.secure` hides; "
            "leave out one of them"
        )
    if clients < LEAST:
        raise SpecError(
            f"`privacy.secure` needs at least {LEAST} clients, got {clients}: a sum of fewer hides nobody; leave it out"
        )
    if clients_per_round < LEAST:
        raise SpecError(
            f"`privacy.secure` hides nobody among {clients_per_round} clients; set `clients_per_round` to {LEAST} or "
            "more"
        )
    assert spec.secure is not None
    if spec.secure.quantile is not None:
        raise SpecError(
            "`privacy.quantile` needs to know of single clients; leave it out with `secure`"
        )
    FixedPoint.of(spec.secure).check(
        clients_per_round if spec.dp is None else clients
    )  # cohorts vary in size
