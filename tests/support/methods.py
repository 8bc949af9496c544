"""Settings to test every registered method with, and how to build one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fedspan.core import registry, tables
from fedspan.core.method import Method
from support.axes import by_axis

GAUSSIAN = {"name": "gaussian", "rank": 3}
TOPK, RANDK = {"name": "topk", "k": 0.3}, {"name": "randk", "k": 0.3}
EVERYTHING = {"name": "randk", "k": 1.0}  # compresses nothing
QSGD = {"name": "qsgd", "levels": 7, "bucket": 10}
TWO_BITS = {
    "name": "feedback",
    "decay": 0.9,
    "compressor": {
        "name": "compose",
        "outer": {"name": "sign", "sizes": 2},
        "inner": TOPK | {"chunk": 7},
    },
}
ADAMW = {
    "name": "adamw",
    "eps": 1e-3,
}  # an eps well above rounding, which a smaller one would scale up
# One or more settings of every registered method; a method without an entry fails the contract suite.
METHODS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [
        {},
        {"server_lr": 0.5},
        {"momentum": 0.5, "schedule": "linear"},
        {"optimizer": ADAMW | {"decay": 0.1}},
    ],
    "fedprox": [
        {},
        {"mu": 2.0, "server_lr": 0.5, "optimizer": ADAMW},
        {"momentum": 0.5, "schedule": "cosine", "warmup": 3},
    ],
    "fednova": [{}, {"server_lr": 0.7, "momentum": 0.5}, {"optimizer": ADAMW}],
    "fedavgm": [
        {},
        {"server_momentum": 0.5, "server_lr": 0.7, "momentum": 0.5},
        {"optimizer": ADAMW},
    ],
    "fedvarp": [
        {},
        {"server_momentum": 0.5, "compressor": QSGD},
        {"optimizer": ADAMW},
    ],
    "feddyn": [
        {},
        {"drift": {"alpha": 1.0}, "server_lr": 0.7, "compressor": QSGD},
        {"drift": {"alpha": 1.0}, "projector": GAUSSIAN, "momentum": 0.5},
        {"optimizer": ADAMW},
    ],
    "mimelite": [
        {},
        {"beta1": 0.5, "server_lr": 0.7, "schedule": "linear"},
    ],
    "scaffnew": [{}, {"schedule": "linear"}],
    "tamuna": [{}, {"owners": 3, "schedule": "cosine"}],
    "fedexp": [
        {},
        {"extrapolate": True, "server_lr": 0.5, "momentum": 0.5},
        {"optimizer": ADAMW},
    ],
    "fedadam": [{}, {"beta1": 0.5, "beta2": 0.9, "tau": 0.1, "server_lr": 0.1, "optimizer": ADAMW}],
    "fedyogi": [{}, {"optimizer": ADAMW}],
    "fedadagrad": [{}, {"beta1": 0.5, "optimizer": ADAMW}],
    "fedit": [
        {"rank": 3},
        {"rank": 0.3, "server_lr": 0.7, "momentum": 0.5},
        {"rank": 3, "optimizer": ADAMW | {"decay": 0.1}},
    ],
    "ffalora": [
        {"rank": 3},
        {"rank": 4, "server_lr": 0.7, "momentum": 0.5},
        {"rank": 3, "extrapolate": True},
        {"rank": {"*": 1.0}, "schedule": "cosine"},
        {"rank": 3, "optimizer": ADAMW | {"decay": 0.1}},
    ],
    "powersgd": [
        {"rank": 1},
        {"rank": 0.4, "server_lr": 0.7, "momentum": 0.5},
        {"optimizer": ADAMW},
    ],
    "scaffold": [
        {},
        {"momentum": 0.5},
        {"optimizer": ADAMW},
        {"correction": "tested", "server_momentum": 0.5},
        {"extrapolate": True},
    ],
    "ssf": [
        {"projector": GAUSSIAN, "correction": "always"},
        {"projector": GAUSSIAN, "control": "paper", "server_lr": 0.7},
        {"projector": {"name": "coordinate", "rank": 0.3}, "refresh": 3},
        {"projector": {"name": "hadamard", "rank": 4}},
        {"projector": {"name": "cycle", "rank": 5}, "refresh": 2},
        {"projector": {"name": "identity"}, "correction": "always"},
        {"projector": GAUSSIAN, "momentum": 0.5, "schedule": "cosine", "correction": "always"},
        {
            "projector": GAUSSIAN,
            "correction": "always",
            "compressor": {"name": "qsgd", "levels": 7},
        },
        {"projector": GAUSSIAN, "compressor": {"name": "sign"}, "beta": 0.3},
        {
            "projector": {"name": "coordinate", "rank": 0.5},
            "compressor": {"name": "topk", "k": 0.5},
        },
        {"projector": GAUSSIAN, "optimizer": ADAMW | {"decay": 0.1}},
        {
            "projector": {"name": "coordinate", "rank": 0.3},
            "refresh": 3,
            "momentum": 0.5,
            "moments": "keep",
        },
        {"projector": GAUSSIAN, "refresh": 2, "optimizer": ADAMW, "moments": "project"},
        {"projector": {"name": "coordinate", "rank": 0.5}, "server_momentum": 0.5, "beta": 0.5},
        {"projector": GAUSSIAN, "compressor": {"name": "qsgd", "levels": 7}},
        {"projector": GAUSSIAN, "correction": "never", "momentum": 0.5, "extrapolate": True},
        {
            "projector": GAUSSIAN,
            "down_compressor": {"name": "qsgd", "levels": 31},
            "server_momentum": 0.5,
            "correction": "always",
        },
        {
            "projector": GAUSSIAN,
            "down_compressor": {"name": "qsgd", "levels": 7},
            "beta": 0.7,
        },
        {
            "projector": {"name": "coordinate", "rank": 0.5},
            "down_compressor": {"name": "sign"},
            "server_momentum": 0.5,
        },
        {"projector": GAUSSIAN, "preconditioner": "rows", "compressor": QSGD | {"bucket": 3}},
        {
            "projector": {"name": "coordinate", "rank": 0.5},
            "preconditioner": "rows",
            "server_momentum": 0.5,
        }
        | {"down_compressor": {"name": "qsgd", "levels": 31}},
    ],
    "subavg": [
        {"projector": GAUSSIAN},
        {
            "projector": {"name": "coordinate", "rank": 0.5},
            "optimizer": ADAMW,
            "moments": "project",
        },
        {"projector": GAUSSIAN, "extrapolate": True},
        {"projector": GAUSSIAN, "down_compressor": {"name": "topk", "k": 0.5}},
        {"projector": GAUSSIAN, "preconditioner": "rows", "server_momentum": 0.5, "server_lr": 0.7},
    ],
    "fedsub": [
        {"projector": GAUSSIAN},
        {"projector": GAUSSIAN, "variant": "stale", "refresh": 2},
        {
            "projector": {"name": "coordinate", "rank": 5},
            "server_lr": 0.5,
            "refresh": 1,
            "momentum": 0.5,
        },
    ],
    "compressed": [
        {},
        {"compressor": RANDK, "server_lr": 0.5, "optimizer": ADAMW},
        {"compressor": {"name": "qsgd", "levels": 31}, "momentum": 0.5},
    ],
    "ef": [
        {},
        {"compressor": {"name": "randk", "k": 5, "unbiased": False}, "server_lr": 0.7},
        {"compressor": {"name": "sign"}, "momentum": 0.5, "schedule": "linear"},
        {"optimizer": ADAMW},
    ],
    "ef21": [
        {"compressor": TOPK},
        {"compressor": {"name": "sign"}, "momentum": 0.5, "server_lr": 0.7},
        {"compressor": TOPK, "optimizer": ADAMW},
    ],
    "qsparse": [
        {},
        {
            "optimizer": ADAMW,
            "compressor": {"name": "compose", "outer": QSGD, "inner": TOPK},
        },
    ],
    "fedsmu": [
        {"lr": 0.1, "server": {"name": "decay", "lr": 0.05, "decay": 0.1}},
        {"lr": 0.1, "momentum": 0.5, "uplink": {"name": "sign_momentum", "beta1": 0.5}},
        {"optimizer": ADAMW},
    ],
    "sparseloco": [
        {"optimizer": ADAMW, "uplink": TWO_BITS},
        {"momentum": 0.5, "uplink": TWO_BITS, "server_lr": 0.7},
    ],
    "doublesqueeze": [
        {},
        {"compressor": {"name": "qsgd", "levels": 31}, "server_lr": 0.7},
        {"compressor": {"name": "randk", "k": 0.3, "unbiased": False}, "momentum": 0.5},
        {"compressor": EVERYTHING, "optimizer": ADAMW},
    ],
    "scallion": [
        {"compressor": RANDK},
        {"compressor": QSGD, "alpha": 0.5, "server_lr": 0.7},
        {"compressor": {"name": "randk", "k": 4}, "schedule": "cosine"},
        {"compressor": EVERYTHING},
        {"compressor": RANDK, "optimizer": ADAMW},
    ],
    "scafcom": [
        {"compressor": TOPK},
        {"compressor": {"name": "sign"}, "beta": 1.0, "server_lr": 0.7},
        {"compressor": TOPK, "optimizer": ADAMW},
    ],
}


def build(name: str, **own: Any) -> Method:
    """A method with small defaults; settings are written flat, see `support.axes`."""
    table = {"name": name, "lr": 0.02, "local_steps": 3} | own
    return tables.build("method", by_axis(table))


def takes(name: str, field: str) -> bool:
    """Whether a method has a hyper-parameter."""
    return any(one.name == field for one in dataclasses.fields(registry.choices("method")[name]))


def in_subspace(name: str) -> bool:
    """Whether x moves inside a random subspace unless told otherwise."""
    fields = {one.name: one.default for one in dataclasses.fields(registry.choices("method")[name])}
    return registry.name_of(fields["space"]) != "identity" if "space" in fields else False


def every_method() -> list[Any]:
    """(name, settings) of everything in the registry, for parametrize."""
    return [
        pytest.param(name, own, id=f"{name}-{number}")
        for name in registry.choices("method")
        for number, own in enumerate(METHODS[name])
    ]
