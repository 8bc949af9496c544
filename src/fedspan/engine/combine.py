"""The place between the replies of a round and the server's step: several replies become one.

A method whose `server_step` uses nothing of the replies but `rnd.mean` takes one vector per run as that mean. So
whatever combines the replies in another way hands it a reply with one row, (runs, 1, n).

Statistics stay as they are: `Round.average` takes their median.
"""

from __future__ import annotations

from typing import Any

import torch

from fedspan.aggregators.mean import Mean
from fedspan.core.aggregator import Aggregator
from fedspan.core.errors import SpecError
from fedspan.core.method import Method, is_plain_sum
from fedspan.core.registry import name_of
from fedspan.core.reply import payload
from fedspan.core.round import Round


def robust(aggregator: Aggregator | None, method: Method) -> Aggregator | None:
    """The aggregator of a run; None for the plain mean.

    Raises:
        SpecError: The server of this method uses more than the mean of the replies, or adds them up over the rounds.
    """
    if aggregator is None or isinstance(aggregator, Mean):
        return None
    if not is_plain_sum(method):
        name, of = name_of(aggregator), name_of(method)
        raise SpecError(
            f"`participation.aggregator` {name!r} takes the place of a mean of plain vectors, and {of} with these "
            "settings uses single replies or codes; leave out a coded `uplink` and server = 'fedexp', or use a "
            "method such as subavg or fedavg, or leave out `aggregator`"
        )
    if method.follows_states:
        name, of = name_of(aggregator), name_of(method)
        raise SpecError(
            f"`participation.aggregator` {name!r} is not for {of} with these settings, whose server adds up replies to "
            "follow the clients' states: what an aggregator leaves out would be missing for ever, and x would drift; "
            "use subavg, fedavg, or ssf with drift.rule = 'paper'"
        )
    return aggregator


def combined(aggregator: Aggregator, up: Any, rnd: Round) -> Any:
    """The replies of a round as one, whose vectors are (runs, 1, n). The payload of a client counts as one vector."""
    vectors = payload(up)
    joined = (
        torch.cat(list(vectors.values()), -1) if len(vectors) > 1 else next(iter(vectors.values()))
    )
    parts = aggregator.combine(joined, rnd).split([part.shape[-1] for part in vectors.values()], -1)
    return up.replace(**dict(zip(vectors, parts, strict=True)))
