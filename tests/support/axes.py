"""Settings of methods in one flat table, as tests write them in a line, put on their axes.

{"name": "ssf", "projector": "gaussian", "server_momentum": 0.5}
→ {"name": "ssf", "space": {"name": "gaussian"}, "server": {"name": "momentum", "beta": 0.5}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_STEP = (
    "fedsub",
    "powersgd",
    "mimelite",
    "tamuna",
    "scaffnew",
)  # boxes of their own, with `server_lr`
ADAPTIVE = {"fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}
FEEDBACK = ("ef", "qsparse", "doublesqueeze")
BITS = {1: 2, 3: 3, 7: 4, 15: 5, 31: 6, 63: 7, 127: 8, 32767: 16}


def by_axis(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of a method with its settings on their axes."""
    table, name = dict(flat), str(flat.get("name", ""))
    take = lambda key, default=None: table.pop(key, default)  # noqa: E731
    space = named(take("projector"))
    if (refresh := take("refresh")) is not None:
        space = (space or {"name": "coordinate", **_rank(name, table)}) | {"refresh": refresh}
    elif space and name == "fedsub":
        space["refresh"] = 5
    if space:
        table["space"] = space
    if (found := _server(name, take)) is not None:
        table["server"] = found
    if found := _local(name, take):
        table["local"] = found
    drift = {new: table.pop(old) for old, new in _DRIFT.items() if old in table}
    if drift:
        table["drift"] = {"name": "proximal" if "mu" in drift else "controls", **drift}
        if name == "ssf" and "correction" not in drift:
            table["drift"]["correction"] = "tested"
    _codes(name, table, take)
    return table


_DRIFT = {"correction": "correction", "control": "rule", "mu": "mu"}


def _rank(name: str, table: dict[str, Any]) -> dict[str, Any]:
    return {} if "rank" in table else {"rank": 0.1}


def _server(name: str, take: Any) -> dict[str, Any] | None:
    if name in OWN_STEP:
        return None
    lr, beta, stretch = take("server_lr"), take("server_momentum"), take("extrapolate", False)
    own = {} if lr is None else {"lr": lr}
    if name in ADAPTIVE:
        keys = ("beta1", "beta2", "tau")
        own |= {key: value for key in keys if (value := take(key)) is not None}
        return {"name": ADAPTIVE[name], **own} if own else None
    if stretch:
        return {"name": "fedexp", **own}
    if beta or (name == "fedavgm" and own):
        return {"name": "momentum", "beta": 0.9 if beta is None else beta, **own}
    return {"name": "mean", **own} if own else None


def _local(name: str, take: Any) -> dict[str, Any] | None:
    momentum, optimizer, moments = take("momentum", 0.0), named(take("optimizer")), take("moments")
    kept = {} if moments in (None, "reset") else {"moments": "project"}
    rows = take("preconditioner", "none")
    if rows != "none":
        own = {key: value for key in ("beta2", "eps") if (value := take(key)) is not None}
        return {"name": "preconditioned", **own}
    if optimizer:
        return optimizer | kept
    return {"name": "sgd", "momentum": momentum, **kept} if momentum else None


def _codes(name: str, table: dict[str, Any], take: Any) -> None:
    code, down = named(take("compressor")), named(take("down_compressor"))
    alpha, beta = take("alpha") if name == "scallion" else None, take("beta")
    if name == "ef21" and code:
        table["uplink"] = {"name": "ef21", "compressor": code}
    elif name in FEEDBACK and code:
        table["uplink"] = {"name": "feedback", "compressor": code}
        down = code if name == "doublesqueeze" else down
    elif name == "scallion" and (code or alpha is not None):
        code = code or {"name": "randk", "k": 0.1}
        share = "unbiased" if alpha is None else alpha
        table["uplink"] = {"name": "code", "compressor": code, "alpha": share}
    elif name == "scafcom" and (code or beta is not None):
        code = code or {"name": "topk", "k": 0.1}
        share = 0.2 if beta is None else beta
        table["uplink"] = {"name": "running_mean", "beta": share, "compressor": code}
    elif beta is not None and beta < 1:
        table["uplink"] = {"name": "running_mean", "beta": beta} | (
            {"compressor": code} if code else {}
        )
    elif code:
        table["uplink"] = code
    if down:
        table["downlink"] = down


def named(choice: Any) -> dict[str, Any] | None:
    """Return a choice as a table, with the bits of QSGD's levels."""
    if choice is None:
        return None
    table = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "levels" in table:
        table["bits"] = BITS[table.pop("levels")]
    for key in ("outer", "inner"):
        if key in table:
            table[key] = named(table[key])
    return table
