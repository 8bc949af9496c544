"""What a client does to its message before it is sent, and the server again to what arrives."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fedspan.core.bundle import Bundle, payload, statistics_in
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Objective
from fedspan.core.registry import name_of
from fedspan.core.round import Round
from fedspan.replies.chain import norms_of, shrunk

MARGIN = 1 - 1e-6  # clients stay so far below the clip that rounding does not lead above it


def clipped(message: Bundle, clip: float | Vector) -> tuple[Bundle, Vector]:
    """(the message with a norm of at most `clip`, its norm before, (runs, clients, 1)); ∞ where that is not finite.

    Where the norm is within the clip, the numbers stay as they are; where it is infinite, they become zeros.
    """
    parts, short = payload(message), {}
    for name, part in parts.items():
        if not (isinstance(part, torch.Tensor) and part.is_floating_point()):
            raise SpecError(
                f"{name!r} of the reply is no vector of real numbers, so it has no norm"
            )
    norm = norms_of(parts.values()).unsqueeze(-1).nan_to_num(torch.inf, torch.inf)
    factor = (clip / norm).clamp(max=1.0)  # C/∞ = 0; C/0 = ∞ → 1
    for name, part in parts.items():
        scaled = torch.where(torch.isfinite(norm), part.double() * factor, 0.0)
        short[name] = torch.where(norm <= clip, part, scaled.to(part.dtype))
    return message.replace(**short), norm


def leaked(method: Method, state: Any, rnd: Round) -> Any:
    """Client states at the start of a round: controls have shrunk once for each round since the client's last one."""
    if rnd.privacy is None or not rnd.privacy.leak or not method.controls:
        return state
    kept = torch.from_numpy(
        (1 - rnd.privacy.leak) ** (rnd.t - rnd.last_round.astype(float))
    ).unsqueeze(-1)
    return shrunk(method, state, kept)


def after(method: Method, before: Any, new: Any, down: Any, up: Any, rnd: Round) -> Any:
    """The clients' states that follow from the message as it was sent; private fields as the local steps left them."""
    begun = before.replace(**{name: getattr(new, name) for name in method.private})
    return method.update_client_state(begun, down, up, rnd)


def private_work(
    method: Method, f: Objective, state: Any, down: Any, sent: Vector | None, rnd: Round
) -> tuple[Any, Any, Vector | None]:
    """The local work of a cohort with privacy: (new states, clipped replies, whether each was within the clip).

    `sent` is the clip of the round where it is adapted, and then each client replies 1/2 or −1/2.
    """
    terms = rnd.privacy
    assert terms is not None
    state, rnd = leaked(method, state, rnd), dataclasses.replace(rnd, overwrite=False)
    new, up = method.client_step(state, down, f, rnd)
    if told := statistics_in(up):
        raise SpecError(
            f"{name_of(method)} sends {next(iter(told))!r} without noise; with `privacy` leave its tests out"
        )
    clip = terms.clip if sent is None else sent.double()
    up, norm = clipped(up, MARGIN * clip)
    within = None if sent is None else (norm <= clip).to(sent.dtype) - 0.5
    return after(method, state, new, down, up, rnd), up, within
