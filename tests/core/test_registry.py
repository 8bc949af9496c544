"""Choices by name, by table or as they are; and one-line errors that name the value and the remedy."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fedspan.cli._fields import settings
from fedspan.compressors import QSGD, Compose, TopK
from fedspan.core import registry, tables
from fedspan.core.compressor import Compressor
from fedspan.core.errors import SpecError
from fedspan.downlinks import Coded
from fedspan.drifts import Proximal
from fedspan.methods import SSF, FedAvg, FedProx
from fedspan.optimizers import AdamW
from fedspan.projectors import Gaussian, Hadamard
from fedspan.uplinks import Code, Feedback, RunningMean


def test_a_name_or_a_table_is_as_good_as_the_value() -> None:
    assert SSF(uplink="qsgd", space="hadamard") == SSF(uplink=Code(QSGD()), space=Hadamard())  # type: ignore[arg-type]
    assert FedAvg(local={"name": "adamw", "eps": 0.1}) == FedAvg(local=AdamW(eps=0.1))  # type: ignore[arg-type]
    both: Any = {"name": "compose", "outer": "qsgd", "inner": "topk"}
    assert Feedback(both).compressor == Compose(outer=QSGD(), inner=TopK())
    for downlink in (
        QSGD(),
        "QSGD",
        "qsgd",
        {"name": "qsgd"},
        {"name": "coded", "compressor": "qsgd"},
    ):
        assert SSF(downlink=downlink).downlink == Coded(QSGD())  # type: ignore[arg-type]
    assert tables.build("projector", Gaussian(rank=2)) == Gaussian(rank=2)


def test_a_table_without_a_name_changes_the_recipes_own_choice() -> None:
    proximal: Any = FedProx(drift={"mu": 0.5})  # type: ignore[arg-type]
    assert proximal == FedProx(drift=Proximal(mu=0.5))
    space: Any = {"rank": 3}
    assert SSF(space=space) == SSF(rank=3)


PARTS = ("projector", "drift", "optimizer", "uplink", "server", "downlink", "compressor")
TAKES = [
    pytest.param(cls, field, kind, id=f"{name}-{field}")
    for of in ("method", *PARTS)
    for name, cls in registry.choices(of).items()
    if cls.__module__.startswith("fedspan.")
    for field, (hint, _) in tables.typed(cls).items()
    for kind in map(registry.kind_of, typing.get_args(hint) or (hint,))
    if kind in PARTS
]


def made(cls: type, arguments: dict[str, Any]) -> Any:
    """The value, or the words of why there is none."""
    try:
        return cls(**arguments)
    except SpecError as error:
        return str(error)


@pytest.mark.parametrize(("cls", "field", "kind"), TAKES)
def test_every_constructor_takes_a_part_by_name_by_table_or_as_it_is(
    cls: type, field: str, kind: str
) -> None:
    """Also those that refuse some parts: all three ways are refused alike."""
    others = {"outer": QSGD(), "inner": TopK()} if cls is Compose else {}
    taken = 0
    for name, part in registry.choices(kind).items():
        if not part.__module__.startswith("fedspan.") or part is Compose:
            continue
        value = made(cls, others | {field: part()})
        assert (
            value
            == made(cls, others | {field: name})
            == made(cls, others | {field: {"name": name}})
        )
        taken += not isinstance(value, str)
        if not isinstance(value, str):
            assert getattr(value, field) == part()
            assert tables.make(cls, others | {field: name}) == value
    assert taken


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"uplink": "qsdg"}, "`uplink` must be one of .* got 'qsdg' .did you mean 'qsgd'"),
        (
            {"uplink": "compose"},
            "`uplink.outer` is missing; it has no default",
        ),
        (
            {"uplink": 3},
            "`uplink` must be an uplink, its name or a table with `name`, got 3",
        ),
        ({"uplink": QSGD}, r"write QSGD\(…\)"),
        ({"local": Gaussian()}, "`local` must be an optimizer"),
        (
            {"space": {"name": "gaussian", "rnk": 3}},
            r"`\[space\]` has no key 'rnk' .did you mean 'rank'",
        ),
        (
            {"space": {"name": "gaussian", "rank": 0}},
            r"`space\.rank` must be a whole number of at least 1",
        ),
    ],
)
def test_what_cannot_be_a_choice_is_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        SSF(**arguments)


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    number: int
    inner: Inner = field(default_factory=Inner)
    names: tuple[str, ...] = ()
    choices: tuple[Compressor, ...] = ()
    by_name: Mapping[str, int | float] | None = None
    way: Literal["a", "b"] | int = "a"


def test_tables_become_dataclasses() -> None:
    table = {
        "number": 1,
        "inner": {"size": 2},
        "names": ["x"],
        "choices": ["qsgd", {"name": "topk", "k": 3}],
        "way": 4,
    }
    made = tables.make(Outer, table | {"by_name": {"b": 1, "a": 0.5}})
    assert made == Outer(
        number=1,
        inner=Inner(size=2.0),
        names=("x",),
        choices=(QSGD(), TopK(k=3)),
        by_name={"b": 1, "a": 0.5},
        way=4,
    )
    assert list(made.by_name) == ["b", "a"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "`number` is missing; it has no default"),
        ({"number": 1.5}, "`number` must be a whole number, got 1.5"),
        ({"number": True}, "`number` must be a whole number, got True"),
        ({"number": 1, "inner": {"size": "x"}}, r"`inner\.size` must be a number, got 'x'"),
        (
            {"number": 1, "inner": {"sise": 1}},
            r"`\[inner\]` has no key 'sise' .did you mean 'size'",
        ),
        ({"number": 1, "names": "x"}, "`names` must be a list, got 'x'"),
        ({"number": 1, "names": [3]}, r"`names\[0\]` must be a text, got 3"),
        ({"number": 1, "choices": ["qsgt"]}, r"`choices\[0\]` must be one of .* got 'qsgt'"),
        ({"number": 1, "by_name": {"a": "x"}}, r"`by_name\.a` must be a number, got 'x'"),
        ({"number": 1, "way": "c"}, "`way` must be 'a' or 'b' or a whole number, got 'c'"),
        ({"nmber": 1}, r"`\[spec\]` has no key 'nmber' .did you mean 'number'"),
    ],
)
def test_a_wrong_value_is_named_as_the_spec_has_it(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as error:
        tables.make(Outer, table)
    assert "\n" not in str(error.value)


def test_the_order_of_rank_patterns_is_part_of_a_value() -> None:
    one, other = SSF(rank={"head*": 1.0, "*": 0.1}), SSF(rank={"*": 0.1, "head*": 1.0})
    assert one != other
    assert hash(one) != hash(other)
    for method in (one, other):
        table = tables.describe(method)
        assert list(table["space"]["rank"]) == list(method.space.rank)  # type: ignore[arg-type]
        assert tables.build("method", table) == method


def test_only_what_has_a_kind_can_be_registered() -> None:
    with pytest.raises(SpecError, match="derive it from one of Method, Projector"):
        registry.register(Inner)
    with pytest.raises(
        SpecError, match=r"Inner is not registered; put @fedspan\.register above the class"
    ):
        registry.name_of(Inner())


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_setting_has_a_line_and_every_name_a_summary(kind: str) -> None:
    for name, cls in registry.choices(kind).items():
        if cls.__module__.startswith("fedspan."):
            assert not [field for field, _, _, words in settings(cls) if len(words) < 8], name
            assert len(registry.summary(cls)) > 15, name
    (beta,) = (row for row in settings(RunningMean) if row[0] == "beta")
    assert beta[1:3] == ("float", "0.2")
    assert beta[3].startswith("β: weight of this round")
