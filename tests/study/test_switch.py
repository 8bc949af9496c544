"""The strip below a chart: what the test of a correction found, and when the correction is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan.api.run import run
from fedspan.core.method import DETAILS
from fedspan.core.spec import Spec
from fedspan.study import report
from support.browsing import SHORT, browse, drawn
from support.runs import TABLE


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SSF with a tested correction, which comes on, beside a method that has none."""
    place = tmp_path_factory.mktemp("switch")
    tested = TABLE["method"] | {"drift": {"correction": "tested"}, "rank": 8}
    settings: dict[str, Any] = TABLE | {"rounds": 30, "clients_per_round": 7}
    for name, method in {
        "tested": tested,
        "fedavg": {"name": "fedavg", "lr": 0.02, "local_steps": 2},
    }.items():
        run(Spec.from_table(settings | {"method": method}), place / name)
    (file,) = report.report([place], place, ["html"], None, "")
    return file


def test_the_history_has_the_switch_and_its_test(page: Path) -> None:
    assert all(f'"{name}":' in page.read_text("utf-8") for name in DETAILS)


@drawn
def test_the_page_draws_the_switch(page: Path) -> None:
    """One line for the tested method, thick from where it is on; none where s̄ itself is shown."""
    code = """
        const box = (what) => one(what).getBoundingClientRect();
        const strip = all('.switch').length ? { off: all('.switch .off').length, on: all('.switch .on').length,
            thick: box('.switch .on').left - box('.switch .off').left,
            below: box('.switch .off').top > box('.frame').bottom,
            right: box('.switch .off').right - box('.frame').right } : null;
        return { strip, caption: texts('.caption'), read: one('.reading').hidden ? '' : one('.reading').innerText };
    """
    seen, itself = browse(
        page, SHORT + code, ("x=round&at=30", 1100), ("x=round&y=correction_test", 1100)
    )
    assert seen["caption"] == ["Test of the correction, s̄: above ½ it pays. Thick: on."]
    assert (seen["strip"]["off"], seen["strip"]["on"], seen["strip"]["below"]) == (1, 1, True)
    assert seen["strip"]["thick"] > 50
    assert abs(seen["strip"]["right"]) < 2
    assert ", on" in seen["read"]
    assert itself["strip"] is None
