"""The leaderboard: every registered method on eight tasks, tuned with equal effort, at equal rounds and equal bytes.

    python benchmarks/leaderboard.py                      # all tasks; hours
    python benchmarks/leaderboard.py tcga_brca a9a --out out/leaderboard --jobs 2
    python benchmarks/leaderboard.py --plan               # what would run; nothing is run
    python benchmarks/leaderboard.py tcga_brca --commit   # and its results to docs/results/leaderboard
    python benchmarks/leaderboard.py --page               # docs/leaderboard.md again, from the committed results

Run it in the root of the repository. A task is a study in `benchmarks/leaderboard/TASK.toml` without its variants:
these are all registered methods with their defaults. `read` has a budget for each axis that results are read on; the
first one bounds every run. A method that the task refuses is left out with the reason, and so is what `[left_out]`
names. Finished runs are kept: a command that was interrupted continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from rich.console import Console

from fedspan.core import registry, tables
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.spec import Spec
from fedspan.data import store
from fedspan.study import results
from fedspan.study.conduct import conduct
from fedspan.study.model import Part, Study, study_of
from fedspan.study.request import prepared
from fedspan.study.results import Entry
from fedspan.study.tables import scale_of
from fedspan.study.verdict import described, told_apart

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks" / "leaderboard"
COMMITTED = ROOT / "docs" / "results" / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"
MADE = Path("out/leaderboard-data")  # relative: the committed specs name it
AXES = {"rounds": "equal rounds", "up": "equal uplink", "total": "equal total bytes"}
QSGD = {"name": "qsgd", "bits": 8, "bucket": 256}
# Settings of a registered method that are entries of their own, if they are not its defaults.
MORE: dict[str, dict[str, Any]] = {
    "ssf, 32 bits": {"name": "ssf", "uplink": "plain", "downlink": "changes"},
    "ssf, 8 bits": {"name": "ssf", "uplink": QSGD, "downlink": QSGD},
}

HEAD = """\
# Leaderboard

Every registered method on one task after the other, tuned with equal effort: each over the same
learning rates, its other settings at their defaults, by the training or validation loss and never
by a result on the test set. 3 seeds each, with a partition and an order of the data of their own.
Results are read three times: after equal rounds, at equal uplink, and at equal bytes in both
directions, each with the learning rate that is best there. A rank in bold: the seeds do not tell
the method from the best one (95 % interval of the difference per seed,
[comparing.md](comparing.md#the-verdict)). A number is a link to the settings of its run and to the
command that makes the run again.

This page is made by `python benchmarks/leaderboard.py --page` from `docs/results/leaderboard`.
"""


def names() -> list[str]:
    """Return the tasks."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def text_of(task: str) -> str:
    """Return the file of a task."""
    return (HERE / f"{task}.toml").read_text("utf-8")


def table_of(task: str) -> dict[str, Any]:
    """Return the file of a task as a table."""
    return tomllib.loads(text_of(task))


def entries() -> dict[str, dict[str, Any]]:
    """Return label → table of every entry: the registered methods of the library, and `MORE`."""
    known = {name: {"name": name} for name in registry.choices("method")}
    plain = [tables.describe(registry.choices("method")[name]()) for name in known]
    more = {
        label: table
        for label, table in MORE.items()
        if tables.describe(tables.build("method", table, "method")) not in plain
    }
    return dict(sorted((known | more).items()))


def study(task: str, only: Sequence[str] = ()) -> Study:
    """Return the study of a task, with a part for each axis that results are read on."""
    table = table_of(task)
    left_out, read, grid = (table.pop(key) for key in ("left_out", "read", "grid"))
    data = table["base"]["task"].get("data")
    if isinstance(data, dict):
        data |= {key: str(MADE / data[key]) for key in ("path", "test_path") if key in data}
    most = read[0]  # no run is longer than this
    table["parts"] = {
        text.partition("=")[0]: {
            "title": AXES[text.partition("=")[0]],
            "budget": [text] if text == most else [text, most],
        }
        for text in read
    }
    variants = {}
    for label, method in entries().items():
        if label in left_out or (only and label not in only):
            continue
        variants[label] = {"label": label, "method": method, "grid": grid}
    found = study_of({"name": task, "variants": variants} | table)
    part = found.parts[0]
    playing = []
    for variant in part.variants:
        try:
            alone = dataclasses.replace(part, variants=[variant])
            prepared(alone, None, None)
            playing.append(variant)
        except FedspanError as error:
            left_out[variant.label] = str(error)
    parts = []
    for one in found.parts:
        one = prepared(dataclasses.replace(one, variants=playing), None, None)
        parts.append(dataclasses.replace(one, about=described(one)))
    about = " ".join([found.about, *(f"Left out: {k}, {why}." for k, why in left_out.items())])
    return dataclasses.replace(found, parts=parts, about=about)


def make_data(task: str) -> None:
    """Write the files of a task whose data set is no data set by name."""
    MADE.mkdir(parents=True, exist_ok=True)
    if task == "nycflights13" and not (MADE / "carriers").exists():
        (MADE / "carriers").mkdir()
        flights = runpy.run_path(str(ROOT / "examples" / "tables.py"))["flights"]()
        for carrier, table in flights.groupby("carrier"):
            table.to_csv(MADE / "carriers" / f"{carrier}.csv", index=False)
    if task == "a9a" and not (MADE / "a9a.npz").exists():
        path = store.folder() / "libsvm" / "a9a.npz"
        if not path.exists():
            raise SpecError(
                f"a9a is not here: put LIBSVM's a9a into {str(path)!r}, with `x` of packed bits and `y`"
            )
        with np.load(path) as found:
            x = np.unpackbits(found["x"], axis=1)[:, :123].astype(np.float32)
            np.savez(MADE / "a9a.npz", x=x, y=(found["y"] > 0).astype(np.int64))


# ---- pages


def commit(made: Path, place: Path) -> None:
    """Copy the results of a task, without its runs, and write the page of their specs and commands."""
    place.mkdir(parents=True, exist_ok=True)
    for name in (results.STUDY, results.CURVES, "index.html", "tables.md"):
        shutil.copy(made / name, place)
    found = results.load(place)
    text = [f"# Runs: {found.study.title}", "", f"All of them: `{found.command} --jobs 2`.", ""]
    text += [
        "A command makes one run again and compares it with its record. The whole specs are in"
    ]
    text += ["[index.html](index.html).", ""]
    for label in dict.fromkeys(one.variant for one in found.entries["rounds"]):
        text += [f"## {label}", ""]
        for part in found.study.parts:
            entry = next(one for one in found.entries[part.name] if one.variant == label)
            spec = Spec.from_table(entry.series.spec)
            method = {"method": tables.describe(spec.method, changed=True)}
            name = f"{part.name}/{label}/seed-{entry.series.seeds[0]}"
            where = place.relative_to(ROOT) if ROOT in place.parents else place
            words = ["fedspan", "report", where.as_posix(), "--verify-run", name]
            result = entry.final.text(*(f"{value:.4g}" for value in entry.final[:2]))
            text += [f"{part.title}: {result} after {entry.curve(part).rounds[-1]:.0f} rounds", ""]
            text += [
                "```toml",
                tomli_w.dumps(method).strip(),
                "```",
                "",
                f"    {shlex.join(words)}",
                "",
            ]
    (place / "runs.md").write_text("\n".join(text), "utf-8")


def ranked(part: Part, made: Sequence[Entry]) -> list[tuple[Entry, bool]]:
    """Return the entries from the best to the worst, and whether the seeds tell each from the best."""
    key = lambda one: (not one.final.whole, -part.sign * one.final.mean)  # noqa: E731
    best, *others = sorted(made, key=key)
    return [(best, False), *((one, told_apart(part, best, one)) for one in others)]


def page(place: Path = COMMITTED) -> str:
    """Return docs/leaderboard.md, made of the results in a folder."""
    there = {task: results.load(place / task) for task in names() if (place / task).is_dir()}
    text = [HEAD]
    for task, found in there.items():
        link = f"results/leaderboard/{task}"
        text += [f"## {found.study.title}", "", f"[Curves and tables]({link}/index.html), "]
        text[-1] += f"`{found.command} --jobs 2`, {found.minutes:.0f} core-minutes."
        text += ["", found.study.about, ""]
        cells: dict[str, list[str]] = {}
        for part in found.study.parts:
            scale = scale_of(part.metric)
            for n, (one, apart) in enumerate(ranked(part, found.entries[part.name]), 1):
                anchor = re.sub(r"[^a-z0-9-]", "", one.variant.lower().replace(" ", "-"))
                value = one.final.text(*(f"{scale * value:.3g}" for value in one.final[:2]))
                value += "" if one.until is None else f", {one.until} rounds"
                rank = str(n) if apart else f"**{n}**"
                cells.setdefault(one.variant, []).append(
                    f"{rank} · [{value}]({link}/runs.md#{anchor})"
                )
        heads = []
        for part in found.study.parts:
            assert part.budget is not None
            heads.append(f"{part.title}: {part.budget.words()}")
        text += [f"| method | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        text += [f"| {label} | {' | '.join(row)} |" for label, row in cells.items()]
        text.append("")
    missing = [task for task in names() if task not in there]
    if missing:
        text += ["## Not run yet", "", "These tasks have a spec and no committed results:", ""]
        text += ["| task | time | command |", "|---|---|---|"]
        for task in missing:
            (hours,) = re.findall(r"^# Estimate: (.*)$", text_of(task), re.M)
            command = f"python benchmarks/leaderboard.py {task} --jobs 2 --commit"
            text.append(f"| {table_of(task)['title']} | {hours} | `{command}` |")
        text.append("")
    return "\n".join(text)


def main() -> None:
    """Make the tasks that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(names())}")
    parser.add_argument("--out", type=Path, default=Path("out/leaderboard"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="LABEL", help="these entries alone"
    )
    parser.add_argument("--plan", action="store_true", help="print what would run")
    parser.add_argument("--commit", action="store_true", help="copy results to docs/results")
    parser.add_argument(
        "--page", action="store_true", help="write docs/leaderboard.md, run nothing"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    for task in [] if given.page else given.tasks or names():
        make_data(task)
        found = study(task, given.only)
        if given.plan:
            show(found)
            continue
        line = f"python benchmarks/leaderboard.py {task}"
        formats = ("html", "md")
        conduct(
            found, given.out / task, jobs=given.jobs, line=line, formats=formats, console=Console()
        )
        if given.commit:
            commit(given.out / task, COMMITTED / task)
    if given.page or given.commit:
        PAGE.write_text(page(), "utf-8")


def show(found: Study) -> None:
    """Print the rounds of every entry on every axis, and who is left out."""
    print(found.title, found.about, sep="\n")
    for part in found.parts:
        assert part.budget is not None
        rounds = [f"{v.label} {part.spec(v, v.points()[0]).rounds}" for v in part.variants]
        print(f"{part.budget.words()}: {', '.join(rounds)} rounds")


if __name__ == "__main__":
    main()
