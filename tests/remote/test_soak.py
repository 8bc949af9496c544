"""Random faults of every kind, many to a run: the run ends with exactly what was accepted, or says why not.

A failure names its seed: `episode(folder, seed)` repeats it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from support.files import damage
from support.flower import inside_a_task  # noqa: F401
from support.soak import DAMAGES, World, world

OF_MESSAGES = [
    "server dies sending", "server dies receiving", "duplicate", "client crash", "client full", "client io",
    "client short", "never starts", "reply lost", "late", "orphan", *(f"file {how}" for how in (*DAMAGES, "foreign")),
]  # fmt: skip


def episode(folder: Path, seed: int) -> Counter[str]:
    """One run with a fault in every third message, on the server's disk and in its files; gives those that happened."""
    with world(folder, seed) as one:
        rng, spoilt = one.rng, Counter[str]()
        bound = rng.random() < 0.3
        one.config |= {"bind_clients": bound, "checkpoint_every": rng.choice([1, 1, 2, 3])}
        kinds = OF_MESSAGES if bound else [*OF_MESSAGES, "moves"]
        one.grid.plan = {n: rng.choice(kinds) for n in range(1, 200) if rng.random() < 0.35}
        one.strikes = [
            (rng.randrange(200), rng.choice(["crash", "short", "full", "io"]))
            for _ in range(rng.randrange(6))
        ]
        one.check(one.finish(lambda: spoil(one, spoilt)))
        return one.grid.done + one.disk.struck + spoilt


def spoil(one: World, spoilt: Counter[str]) -> Callable[[], None] | None:
    """Damage a file of the server, which is down; gives what puts it back."""
    files = [
        path for path in one.server_files() if path.name != "audit.jsonl"
    ]  # which decides nothing
    if not files or one.rng.random() < 0.5:
        return None
    path, how, backup = (
        one.rng.choice(files),
        one.rng.choice(DAMAGES),
        one.folder / f"backup-{spoilt.total()}",
    )
    shutil.copytree(one.out, backup)
    damage(path, how)
    spoilt[f"server's file {how}"] += 1

    def mend() -> None:
        shutil.rmtree(one.out)
        shutil.copytree(backup, one.out)

    return mend


def test_a_fault_of_the_servers_disk_does_not_strike_the_harness(tmp_path: Path) -> None:
    """Here the server's disk is to fail while the harness damages a client's file."""
    assert episode(tmp_path / "x", 910003).total() > 10


@pytest.mark.parametrize(
    "faults", [pytest.param(60, id="some"), pytest.param(1000, id="many", marks=pytest.mark.slow)]
)
def test_random_faults_lose_and_double_nothing(faults: int, tmp_path: Path) -> None:
    """pytest -m slow -s tests/remote/test_soak.py: 1,000 faults in a few minutes."""
    found, seed = Counter[str](), 0
    while found.total() < faults:
        try:
            found += episode(tmp_path / f"{seed}", seed)
        except BaseException as error:
            error.add_note(f"episode(folder, {seed}) repeats this")
            raise
        seed += 1
    print(f"{found.total()} faults in {seed} runs: {dict(found)}")  # noqa: T201
    if faults > 500:
        assert len(found) >= len(OF_MESSAGES) + 8, "every kind has happened"
