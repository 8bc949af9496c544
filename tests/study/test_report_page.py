"""The page of a report in a browser: what a link, the pointer and the keys show, and what is drawn where."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from rich.console import Console

from fedspan.study import conduct, results
from fedspan.study.curves import Axis, Series, pareto
from fedspan.study.request import requested
from support.browsing import SHORT, browse, drawn
from support.runs import TABLE

WIDE = ("", 1100)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of four methods, one of which diverges, with a label that would like to be a script."""
    place = tmp_path_factory.mktemp("page")
    (place / "base.toml").write_text(tomli_w.dumps(TABLE | {"rounds": 30}))
    study = requested(
        place / "base.toml",
        methods=["ssf,scaffold as </script><b>,fedavg:lr=50.0 as Too far", "fedavg"],
        grids=["ssf:lr=0.01,0.05"],
        seeds=2,
    )
    conduct.conduct(
        study,
        place / "out",
        jobs=1,
        resume=False,
        formats=["html"],
        line="fedspan …",
        console=Console(quiet=True),
    )
    return place / "out" / "index.html"


@drawn
def test_a_link_decides_the_axes(page: Path) -> None:
    code = SHORT + "return [...texts('.label'), all('path.band').length]"
    usual, linked = browse(page, code, WIDE, ("x=round&y=loss&band=0", 1100))
    assert usual == ["kB sent up, all clients", "relative error", 3]
    assert linked == ["round", "test loss", 0]


@drawn
def test_the_state_decides_the_drawing(page: Path) -> None:
    code = """
        const on = all('.controls input').filter((i) => i.checked).map((i) => i.dataset.key ?? i.value);
        return { on, titles: texts('.label'), lines: all('.plot path.mean').length, pareto: all('path.pareto').length };
    """
    usual, plain, logged, wrong, none = browse(
        page,
        SHORT + code,
        WIDE,
        ("x=total&y=loss&logx=0&logy=0&band=0&pareto=1", 1100),
        ("x=seconds&logx=1", 1100),
        ("x=nonsense&y=%3Cb%3E&off=99&at=none", 1100),
        ("off=0.1.2.3", 1100),
    )
    # The run that went too far has one row, at no cost, which a logarithmic axis has no place for. One line is the test
    # of SSF's correction.
    assert usual == {"on": ["up", "rel_err", "logx", "logy", "band"], "lines": 4, "pareto": 0} | {
        "titles": ["kB sent up, all clients", "relative error"]
    }
    assert plain == {"on": ["total", "loss", "pareto"], "lines": 5, "pareto": 1} | {
        "titles": ["kB sent, both directions, all clients", "test loss"]
    }
    assert logged["on"] == ["seconds", "rel_err", "logx", "logy", "band"]
    assert wrong == usual
    assert (none["lines"], none["titles"]) == (0, [])


@drawn
def test_controls_and_legend_change_the_state(page: Path) -> None:
    code = """
        const key = all('.key').find((k) => k.textContent === 'ssf');
        const seen = { keys: texts('.key'), bold: all('main b').length };
        key.click();
        seen.fewer = [all('.plot path.mean').length, key.getAttribute('aria-pressed'), location.hash];
        one('input[value=round]').click();
        seen.round = [texts('.label')[0], location.hash];
        one('input[data-key=logy]').click();
        key.click();
        return { ...seen, end: location.hash };
    """
    (seen,) = browse(page, SHORT + code, WIDE)
    assert seen["keys"] == ["ssf", "</script><b>", "Too far ✕", "fedavg"]
    assert seen["bold"] == 0
    assert seen["fewer"] == [2, "false", "#off=0"]
    assert seen["round"] == ["round", "#off=0&x=round"]
    assert seen["end"] == "#x=round&logy=0"


@drawn
def test_values_are_read_with_a_link_the_pointer_and_the_keys(page: Path) -> None:
    code = """
        const read = () => one('.reading').hidden ? null : one('.reading').innerText.replaceAll('\\n', ' ');
        const point = (type, x) => one('.plot svg').dispatchEvent(new PointerEvent(type, { clientX: x, clientY: 60 }));
        const press = (key) => { one('.plot svg').dispatchEvent(new KeyboardEvent('keydown', { key })); };
        const seen = { linked: read() };
        point('pointermove', one('.plot svg').getBoundingClientRect().right - 14);
        seen.pointed = read();
        point('pointerleave', 0);
        seen.left = read();
        const hash = (key) => { press(key); return location.hash; };
        one('.plot svg').focus();
        seen.keys = ['End', 'ArrowLeft', 'Home', 'ArrowRight', 'Escape'].map(hash);
        return { ...seen, after: read(), focus: document.activeElement === one('.plot svg') };
    """
    (seen,) = browse(page, SHORT + code, ("x=round&at=11", 1100))
    curve = next(s for s in of_page(page) if s.spec["method"]["name"] == "scaffold").curve(
        "rel_err"
    )
    for words, t in (
        (seen["linked"], 10),
        (seen["pointed"], 30),
    ):  # of each line the last evaluation that costs no more
        values = curve.values[:, list(curve.rounds).index(t)]
        found = re.search(r"</script><b> (\S+) \((\S+) to (\S+)\)", words)
        assert found, words
        assert [float(n) for n in found.groups()] == pytest.approx(
            [values.mean(), values.min(), values.max()], rel=5e-3
        )
        assert "Too far" not in words  # it has diverged by then
    assert seen["linked"].startswith("round: 11")
    assert seen["pointed"].startswith("round: 30")
    assert seen["left"] == seen["linked"]
    assert seen["keys"] == [
        "#x=round&at=30",
        "#x=round&at=28",
        "#x=round&at=0",
        "#x=round&at=2",
        "#x=round",
    ]
    assert seen["after"] is None
    assert seen["focus"]  # though the chart was drawn anew


def of_page(page: Path) -> list[Series]:
    """The series that the page shows, in its order."""
    return [entry.series for entry in results.load(page.parent).entries["comparison"]]


@drawn
def test_the_drawn_pareto_front_is_that_of_the_tables(page: Path) -> None:
    axes: tuple[tuple[Axis, float], ...] = (("up", 1e3), ("total", 1e3), ("round", 1.0))
    code = SHORT + "return JSON.parse(one('path.pareto').dataset.stops)"
    seen = browse(page, code, *((f"x={axis}&pareto=1", 1100) for axis, _ in axes))
    for (axis, unit), stops in zip(axes, seen, strict=True):
        wanted = pareto(of_page(page), "rel_err", "min", axis)
        assert len(wanted) > 3
        assert [number for number, _, _ in wanted] == [number for number, _, _ in stops]
        np.testing.assert_allclose(
            [[cost / unit, value] for _, cost, value in wanted], [s[1:] for s in stops], rtol=1e-4
        )


@drawn
def test_nothing_runs_out_of_the_page_and_no_text_into_another(page: Path) -> None:
    code = """
        all('details').forEach((d) => { d.open = true; });
        const boxes = all('.plot svg text').map((t) => t.getBoundingClientRect());
        const across = (a, b) => a.left < b.right && b.left < a.right;
        const along = (a, b) => a.top + 2 < b.bottom && b.top + 2 < a.bottom;
        const overlaps = boxes.filter((a, n) => boxes.some((b, m) => m > n && across(a, b) && along(a, b))).length;
        const out = boxes.filter((t) => t.left < 0 || t.right > innerWidth).length;
        const { scrollWidth, clientWidth } = document.documentElement;
        return { overlaps, out, many: boxes.length > 5, over: scrollWidth - clientWidth, inner: innerWidth };
    """
    states = ("", "x=round&logy=0&at=20", "x=seconds&y=loss&logy=1", "x=total&logx=0")
    views = [(state, width) for state in states for width in (360, 1100)]
    for (state, width), seen in zip(views, browse(page, SHORT + code, *views), strict=True):
        assert seen == {"overlaps": 0, "out": 0, "many": True, "over": 0, "inner": width}, state


@drawn
def test_tables_are_sorted_by_their_numbers(page: Path) -> None:
    code = """
        const head = one('table').tHead.rows[0].cells[2];
        const column = () => [...one('table').tBodies[0].rows].map((r) => r.cells[2].textContent);
        const press = () => head.querySelector('button').click();
        const sorted = () => { press(); return [column(), head.getAttribute('aria-sort')]; };
        return [sorted(), sorted()];
    """
    ((up, down),) = browse(page, SHORT + code, WIDE)
    numbers = [float(text.split()[0]) for text in up[0][:-1]]
    assert len(numbers) == 3
    assert numbers == sorted(numbers)
    assert [float(text.split()[0]) for text in down[0][:-1]] == numbers[::-1]
    assert up[0][-1] == down[0][-1] == "diverged"
    assert (up[1], down[1]) == ("ascending", "descending")
