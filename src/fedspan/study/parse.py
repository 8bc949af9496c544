"""Studies as TOML. Settings have four levels, each laid over the one before: study, part, scale, part of a scale.

title = "…"                               # all keys but base and variants have defaults
seeds = 3                                 # a setting of every part
scale = "laptop"                          # the default of --scale
[base]                                    # a spec
[variants.ssf]                            # tables laid over the base
label = "SSF"
method = { rank = 0.1 }
grid = { "method.lr" = [0.1, 0.3, 1.0] }
[parts.rank]                              # without parts, the study is one comparison of all variants
variants = ["ssf", "small"]               # names from above and of its own
own.small = { method = { rank = 0.05 } }
grid = { "method.lr" = [0.1, 0.3] }       # replaces the variants' own values
rows = [{ het = 0.1 }, { het = 2.0 }]     # `$het` in base, variants and `set` stands for the row's value
[scales.smoke]                            # changes to every part; parts.NAME to one
points = 1                                # values kept of the middle of every grid
base = { rounds = 2 }
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from fedspan.core.errors import SpecError, at_least, number, one_of, shown
from fedspan.core.spec import read_toml
from fedspan.study.budget import Budget
from fedspan.study.model import (
    CHANGEABLE,
    COLORS,
    Part,
    Row,
    Study,
    Table,
    Variant,
    goal_of,
    laid_over,
)

SPECS = Path(__file__).parent / "specs"
WORDS = ("name", "title", "about", "variants", "given")  # fields of a part that are not handed down
SETTINGS = tuple(f.name for f in dataclasses.fields(Part) if f.name not in WORDS)
STUDY = ("name", "title", "about", "variants", "scale", "scales", "parts", *SETTINGS)
SCALE = ("about", "only", "points", "parts", *SETTINGS)
TYPES: dict[str, type] = {  # of settings that no other function checks
    "base": dict, "rows": list, "set": dict, "tune_by": str, "metric": str, "claims": list, "tuned_in": str,
    "figure": dict,
}  # fmt: skip
CALLED: dict[type, str] = {dict: "a table", list: "a list", str: "a text"}


def names() -> list[str]:
    """The studies that come with fedspan."""
    return sorted(file.stem for file in SPECS.glob("*.toml"))


def committed(name: str, scale: str | None = None, seeds: int | None = None) -> Study:
    """The study NAME at a scale; by default at the one its file names."""
    one_of("study", name, names())
    return study_of({"name": name} | read_toml(SPECS / f"{name}.toml"), scale, seeds)


def study_of(table: Table, scale: str | None = None, seeds: int | None = None) -> Study:
    """A study from its table; `seeds` replaces the number of seeds of every part."""
    _known("a comparison", table, STUDY)
    scales, scale = _tables("scales", table.get("scales", {})), scale or table.get("scale")
    if scale is not None:
        one_of("scale", scale, scales)
    if seeds is not None:
        at_least("seeds", seeds, 1)
    size = {} if scale is None else scales[scale]
    _known(f"[scales.{scale}]", size, SCALE)
    parts = _tables("parts", table.get("parts", {"comparison": {}}))
    wanted = _typed(f"scales.{scale}.only", size.get("only", list(parts)), list)
    texts = {key: _typed(key, table.get(key, ""), str) for key in ("name", "title", "about")}
    found = [_part(name, one, table, size, seeds) for name, one in parts.items() if name in wanted]
    if not found:
        raise SpecError("a comparison has no part; give [base] and [variants.NAME]")
    about = " ".join(
        text.strip()
        for text in (texts["about"], _typed("about", size.get("about", ""), str))
        if text
    )
    return Study(texts["name"] or "comparison", found, texts["title"], about)


def _part(name: str, table: Table, shared: Table, size: Table, seeds: int | None) -> Part:
    _known(f"[parts.{name}]", table, (*WORDS[:-1], "own", "grid", *SETTINGS))
    levels = [shared, table, size, _tables("scales.….parts", size.get("parts", {})).get(name, {})]
    chosen: Table = reduce(
        laid_over, ({k: v for k, v in one.items() if k in SETTINGS} for one in levels), {}
    )
    for key, kind in TYPES.items():
        if key in chosen:
            _typed(key, chosen[key], kind)
    known = _variants("variants", shared.get("variants", {})) | _variants(
        f"parts.{name}.own", table.get("own", {})
    )
    own = table.get("variants", list(known))
    if isinstance(own, dict):
        known = _variants(f"parts.{name}.variants", own)
    wanted = list(known) if isinstance(own, dict) else _typed(f"parts.{name}.variants", own, list)
    for one in wanted:
        one_of(f"variant of [parts.{name}]", one, known)
    if "base" not in chosen or not known:
        raise SpecError("a comparison needs [base] and [variants.NAME]")
    metric = chosen.get("metric", "accuracy")
    if "goal" in chosen and not metric:
        raise SpecError(f"`goal` {chosen['goal']!r} needs the `metric` that it is of; give both")
    goal = chosen.get("goal") or (
        goal_of(metric, chosen["base"].get("metrics", ())) if metric else "max"
    )
    typed: Table = {"metric": metric} | chosen | {"goal": goal}
    typed["budget"] = Budget.parse(chosen.get("budget", ()))
    typed["rows"] = [_row(one) for one in chosen.get("rows", [{}])]
    typed |= {} if seeds is None else {"seeds": seeds}
    if (points := size.get("points")) is not None:
        at_least("points", points, 1)
    variants = [_thinned(known[one], _grid(f"parts.{name}", table), points) for one in wanted]
    texts = {
        key: _typed(f"parts.{name}.{key}", table.get(key, ""), str) for key in ("title", "about")
    }
    return Part(name=name, variants=variants, **texts, **typed)


def _typed(where: str, value: Any, kind: type) -> Any:
    """Refuses a value of another type."""
    if not isinstance(value, kind):
        raise SpecError(f"`{where}` must be {CALLED[kind]}, got {shown(value)}")
    return value


def _tables(where: str, value: Any) -> Table:
    """Refuses what is not a table of tables."""
    return {
        name: _typed(f"{where}.{name}", one, dict)
        for name, one in _typed(where, value, dict).items()
    }


def _grid(where: str, table: Table) -> dict[str, list[Any]]:
    """The values that a variant or a part is tuned over, by dotted key."""
    grid: dict[str, list[Any]] = _typed(f"{where}.grid", table.get("grid", {}), dict)
    for key, values in grid.items():
        if not _typed(f"{where}.grid: {key}", values, list):
            raise SpecError(
                f"`{where}.grid` has no values for {key!r}; give a list such as [0.03, 0.1, 0.3]"
            )
    return dict(grid)


def _variants(where: str, table: Any) -> dict[str, Variant]:
    """Variants by name; label and color may be left out."""
    out = {}
    for place, (name, one) in enumerate(_tables(where, table).items()):
        _known(f"[variants.{name}]", one, (*CHANGEABLE, "label", "color", "grid"))
        changes = {key: one[key] for key in CHANGEABLE if key in one}
        words = {"label": name, "color": COLORS[place % len(COLORS)]} | one
        label, color = (
            _typed(f"{where}.{name}.{key}", words[key], str) for key in ("label", "color")
        )
        out[name] = Variant(name, label, color, changes, _grid(f"{where}.{name}", one))
    return out


def _row(table: Any) -> Row:
    _typed("rows", table, dict)
    for key, kind in {"published": dict, "variants": list}.items():
        if key in table:
            _typed(f"rows: {key}", table[key], kind)
    if "target" in table:
        number("rows: target", table["target"])
    own = {
        f.name: table[f.name]
        for f in dataclasses.fields(Row)
        if f.name != "values" and f.name in table
    }
    return Row({key: value for key, value in table.items() if key not in own}, **own)


def _thinned(variant: Variant, grid: Table, points: int | None) -> Variant:
    """The variant with the grid of its part, and only so many values of the middle of each grid."""
    grid = variant.grid | grid
    if points is not None:
        starts = {key: max(0, (len(values) - points) // 2) for key, values in grid.items()}
        grid = {key: values[starts[key] : starts[key] + points] for key, values in grid.items()}
    return dataclasses.replace(variant, grid=grid)


def table_of(study: Study) -> Table:
    """What `study_of` reads this study from, with every level laid over; a study of one part has no [parts]."""
    words = {key: text for key in ("name", "title", "about") if (text := getattr(study, key))}
    parts = {part.name: _table(part) for part in study.parts}
    if list(parts) == ["comparison"]:
        return words | parts["comparison"]
    return words | {"parts": parts}


def _table(part: Part) -> Table:
    fields = {
        f.name: getattr(part, f.name)
        for f in dataclasses.fields(part)
        if f.name not in ("name", "given")
    }
    plain = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
    plain["variants"] = {
        v.name: {"label": v.label, "color": v.color, "grid": v.grid} | v.table
        for v in part.variants
    }
    plain["rows"] = [
        row.values
        | {
            k: v
            for k, v in dataclasses.asdict(row).items()
            if k != "values" and v not in (None, {})
        }
        for row in part.rows
    ]
    if plain["rows"] == [{}]:
        del plain["rows"]
    return plain | ({} if part.budget is None else {"budget": part.budget.texts()})


def _known(where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        one_of(f"key of {where}", key, keys)
