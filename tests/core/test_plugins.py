"""Files of a user's own: what a newcomer forgets is named in one line, with its remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn

import fedspan
from fedspan.compressors import QSGD, TopK
from fedspan.core import registry
from fedspan.core.errors import SpecError
from fedspan.core.plugins import load_plugin
from fedspan.core.spec import Spec
from fedspan.projectors import Cycle, Gaussian
from fedspan.uplinks import Code
from support.commands import main
from support.loops import RUN, SMALL, advance, small, start

ROOT = Path(__file__).parents[2]
WHOLE = (ROOT / "examples" / "new_method.py").read_text("utf-8")
SERVER_STEP = WHOLE[WHOLE.index("    def server_step") : WHOLE.index('if __name__ == "__main__"')]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What these files register is gone after each test."""
    yield
    for known in registry._known.values():
        known.pop("mine", None)
        known.pop("always_half", None)
    sys.modules.pop("mine", None)


MISTAKES = {
    "abstract": (
        WHOLE.replace(SERVER_STEP, ""),
        " in line 23 of mine.py: the method FedProx lacks server_step, which every method needs",
    ),
    "register": (
        WHOLE.replace("@fedspan.register\n", ""),
        "registers nothing: put @fedspan.register above the class FedP",
    ),
    "nothing": (
        "x = 1\n",
        "registers nothing: it has no class that derives from one of Method, Projector",
    ),
    "command": ("def command() -> None: ...\n", "registers nothing: a plugin cannot add a command"),
    "syntax": ("def f(:\n", " in line 1 of mine.py: SyntaxError: invalid syntax"),
    "import": (
        "import fedspan\nimport nowhere_to_be_found\n",
        " in line 2 of mine.py: ModuleNotFoundError: No module named 'nowhere",
    ),
    "dataclass": (
        WHOLE.replace(
            "@fedspan.register\n@dataclass(frozen=True, kw_only=True)", "@fedspan.register"
        ),
        "mu of FedProx would be no setting: put @dataclass(frozen=True, kw_only=True) between",
    ),
    "hidden": (
        WHOLE.replace("mu: float", "spans_run: bool = True\n    mu: float"),
        "the setting 'spans_run' of FedProx hides what LocalSteps has under this name; rename the setting",
    ),
    "exit": ("import sys\n\nsys.exit(0)\n", "line 3 of mine.py: it ends Python; remove `exit`"),
    "two lines": ("raise RuntimeError('a\\nb')\n", "line 1 of mine.py: RuntimeError: a b"),
    "base": (
        "import fedspan\n\n@fedspan.register\nclass A: ...\n",
        "line 3 of mine.py: A cannot be registered; derive it from one of",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_a_file_is_one_line(kind: str, tmp_path: Path) -> None:
    text, words = MISTAKES[kind]
    path = tmp_path / "mine.py"
    path.write_text(text, "utf-8")
    with pytest.raises(SpecError) as error:
        load_plugin(path)
    assert words in str(error.value)
    assert str(error.value).startswith(f"plugin file {str(path)!r}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedavg.py", "FedProx would replace fedspan's own method 'fedavg'; rename its file"),
        ("random.py", "the name of a module of Python"),
        ("pandas.py", "the name of the module .*pandas"),
    ],
)
def test_a_file_cannot_take_the_place_of_another(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(WHOLE, "utf-8")
    with pytest.raises(SpecError, match=words):
        load_plugin(tmp_path / name)


def test_two_metrics_of_one_file_have_names_of_their_own(tmp_path: Path) -> None:
    lines = ["import fedspan"]
    for name, value in (("Mine", 1.0), ("AlwaysHalf", 0.5)):
        lines += [
            "@fedspan.register",
            f"class {name}(fedspan.Metric):",
            "    def update(self, outputs, targets): ...",
        ]
        lines += [f"    def compute(self): return {value}"]
    path = tmp_path / "mine.py"
    path.write_text("\n".join(lines))
    for _ in range(2):  # loaded again, they keep their names
        first, second = load_plugin(path)
        x, y = torch.ones(4, 2), torch.zeros(4).long()
        fit = {"test": (x, y), "rounds": 1, "method": "fedavg", "progress": False}
        for metrics, columns in (
            (["mine", "always_half"], ("mine", "always_half")),
            ([first, second], ("mine", "always_half")),
        ):
            row = fedspan.fit(nn.Linear(2, 2), [(x, y)], metrics=metrics, **fit).history[-1]
            assert [row[column] for column in columns] == [1.0, 0.5]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(path.read_text())
    with pytest.raises(SpecError, match=r"has the name of the module .*mine\.py'; rename the file"):
        load_plugin(tmp_path / "other" / "mine.py")


def test_a_mean_without_keepdim_is_noticed(tmp_path: Path) -> None:
    """With one seed the shapes happen to fit; with two the model would have grown an axis."""
    path = tmp_path / "mine.py"
    path.write_text(WHOLE.replace("rnd.mean(up.dy)", "up.dy.mean(1)"), "utf-8")
    (cls,) = load_plugin(path)
    loop = start(cls(lr=0.02), small(seeds=(5, 6)))
    with pytest.raises(
        SpecError,
        match=r"FedProx returns x of shape \(2, 2, 24\) instead of \(2, 1, 24\).*keepdim=True",
    ):
        advance(loop, 1)


def test_another_name_keeps_the_settings_that_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    method = {
        "name": "ssf",
        "lr": 0.1,
        "local_steps": 3,
        "rank": 0.5,
        "uplink": {"name": "qsgd", "bits": 3},
        "space": {"name": "cycle", "refresh": 2},
    }
    path.write_text(tomli_w.dumps(RUN | {"method": method, "task": SMALL}), "utf-8")
    same: Any = {"lr": 0.1, "local_steps": 3, "uplink": QSGD(bits=3), "space": Cycle(refresh=2)}
    with pytest.warns(UserWarning, match="^method.name=fedavg drops rank of the method 'ssf'$"):
        assert Spec.load(path, ("method.name=fedavg",)).method == fedspan.methods.FedAvg(**same)
    subavg = fedspan.methods.SubAvg(rank=0.5, **same)
    assert Spec.load(path, ("method.name=subavg",)).method == subavg
    with pytest.warns(UserWarning, match="drops rank, uplink, space of"):  # its rank is another one
        spec = Spec.load(path, ("method.name=powersgd", "method.rank=2"))
    assert spec.method == fedspan.methods.PowerSGD(lr=0.1, local_steps=3, rank=2)
    with pytest.raises(SpecError, match="did you mean 'fedavg'"):
        Spec.load(path, ("method.name=fedavgg",))
    again: Any = Spec.load(path, ("method.name=ssf", "method.space.name=gaussian")).method
    assert again.space == Gaussian(rank=0.5, refresh=2)
    with pytest.warns(UserWarning, match="method.uplink.name=topk drops bits of the uplink 'qsgd'"):
        again = Spec.load(path, ("method.uplink.name=topk",)).method
    assert again.uplink == Code(TopK())


def test_the_command_line_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    spec, plugin = tmp_path / "spec.toml", tmp_path / "mine.py"
    spec.write_text(tomli_w.dumps(RUN), "utf-8")
    plugin.write_text(MISTAKES["register"][0], "utf-8")
    assert main(monkeypatch, "run", spec, "--plugin", plugin) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: plugin file")
    assert told.count("\n") == 1


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    """Two texts of the same size within one second have the same bytecode for Python's own import."""
    path = tmp_path / "twice_in_a_second.py"
    found = []
    for value in (1, 2):
        path.write_text(
            f"import fedspan\n\n@fedspan.register\nclass TwiceInASecond(fedspan.Metric):\n    number = {value}\n"
            "    def update(self, outputs, targets): pass\n    def compute(self): return 0.0\n"
        )
        os.utime(path, (1_700_000_000, 1_700_000_000))
        (cls,) = load_plugin(path)
        found.append(cls.number)
    registry._known["metric"].pop("twice_in_a_second")
    assert found == [1, 2]
