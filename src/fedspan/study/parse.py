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

from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.core.spec import read_toml
from fedspan.study.budget import Budget
from fedspan.study.model import CHANGEABLE, COLORS, Part, Row, Study, Table, Variant, goal_of, laid_over

SPECS = Path(__file__).parent / "specs"
WORDS = ("name", "title", "about", "variants", "given")  # fields of a part that are not handed down
SETTINGS = tuple(f.name for f in dataclasses.fields(Part) if f.name not in WORDS)
STUDY = ("name", "title", "about", "variants", "scale", "scales", "parts", *SETTINGS)
SCALE = ("about", "only", "points", "parts", *SETTINGS)


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
    scales, scale = table.get("scales", {}), scale or table.get("scale")
    if scale is not None:
        one_of("scale", scale, scales)
    if seeds is not None:
        at_least("seeds", seeds, 1)
    size = scales.get(scale, {})
    _known(f"[scales.{scale}]", size, SCALE)
    parts = table.get("parts", {"comparison": {}})
    wanted = size.get("only", list(parts))
    found = [_part(name, one, table, size, seeds) for name, one in parts.items() if name in wanted]
    about = " ".join(text.strip() for text in (table.get("about", ""), size.get("about", "")) if text)
    return Study(table.get("name", "comparison"), found, table.get("title", ""), about)


def _part(name: str, table: Table, shared: Table, size: Table, seeds: int | None) -> Part:
    _known(f"[parts.{name}]", table, (*WORDS[:-1], "own", "grid", *SETTINGS))
    levels = [shared, table, size, size.get("parts", {}).get(name, {})]
    chosen: Table = reduce(laid_over, ({k: v for k, v in one.items() if k in SETTINGS} for one in levels), {})
    known = _variants(shared.get("variants", {})) | _variants(table.get("own", {}))
    if isinstance(table.get("variants"), dict):
        known = _variants(table["variants"])
    wanted = table["variants"] if isinstance(table.get("variants"), list) else list(known)
    for one in wanted:
        one_of(f"variant of [parts.{name}]", one, known)
    if not isinstance(chosen.get("base"), dict) or not known:
        raise SpecError("a comparison needs [base] and [variants.NAME]")
    metric = chosen.get("metric", "accuracy")
    if "goal" in chosen and not metric:
        raise SpecError(f"`goal` {chosen['goal']!r} needs the `metric` that it is of; give both")
    goal = chosen.get("goal") or (goal_of(metric, chosen["base"].get("metrics", ())) if metric else "max")
    typed: Table = {"metric": metric} | chosen | {"goal": goal}
    typed["budget"] = Budget.parse(chosen.get("budget", ()))
    typed["rows"] = [_row(one) for one in chosen.get("rows", [{}])]
    typed |= {} if seeds is None else {"seeds": seeds}
    variants = [_thinned(known[one], table.get("grid", {}), size.get("points")) for one in wanted]
    return Part(name=name, variants=variants, title=table.get("title", ""), about=table.get("about", ""), **typed)


def _variants(table: Mapping[str, Any]) -> dict[str, Variant]:
    """Variants by name; label and color may be left out."""
    out = {}
    for number, (name, one) in enumerate(table.items()):
        _known(f"[variants.{name}]", one, (*CHANGEABLE, "label", "color", "grid"))
        changes = {key: one[key] for key in CHANGEABLE if key in one}
        color = one.get("color", COLORS[number % len(COLORS)])
        out[name] = Variant(name, one.get("label", name), color, changes, dict(one.get("grid", {})))
    return out


def _row(table: Table) -> Row:
    own = {f.name: table[f.name] for f in dataclasses.fields(Row) if f.name != "values" and f.name in table}
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
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name not in ("name", "given")}
    plain = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
    plain["variants"] = {v.name: {"label": v.label, "color": v.color, "grid": v.grid} | v.table for v in part.variants}
    plain["rows"] = [
        row.values | {k: v for k, v in dataclasses.asdict(row).items() if k != "values" and v not in (None, {})}
        for row in part.rows
    ]
    if plain["rows"] == [{}]:
        del plain["rows"]
    return plain | ({} if part.budget is None else {"budget": part.budget.texts()})


def _known(where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        one_of(f"key of {where}", key, keys)
