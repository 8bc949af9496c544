"""`fedspan check-method` on files as newcomers write them, and its laws on the parts that fedspan ships."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedspan.checks import part_laws
from fedspan.cli.app import app
from fedspan.core import registry, tables
from fedspan.core.errors import SpecError

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_method.py"
DRIFT = '''
"""FedAvg whose clients remember how far they were pulled."""
from dataclasses import dataclass
import torch
import fedspan
from fedspan import Bundle
from fedspan.methods.base import LocalSteps


@fedspan.register
@dataclass(frozen=True, kw_only=True)
class Drift(LocalSteps):
    mu: float = 0.1  # strength of the memory

    def init_server(self, x0, layout):
        return Bundle(x=x0)

    def init_client(self, x0, layout):
        return Bundle(pull=torch.zeros_like(x0))

    def broadcast(self, server, rnd):
        return server

    def client_step(self, client, down, f, rnd):
        dy = self.descend(down.x, f.direction(self.mu * client.pull), self.rate(rnd)) - down.x
        return Bundle(pull=0.5 * client.pull + dy), Bundle(dy=dy)

    def server_step(self, server, up, rnd):
        return Bundle(x=server.x + rnd.mean(up.dy))
'''
SIXTH = """
    def update_client_state(self, client, down, up, rnd):
        return Bundle(pull=0.5 * client.pull + up.dy)
"""
HALF = '''
"""Halves every number, and says that it is unbiased."""
from dataclasses import dataclass
import fedspan
from fedspan import Encoded


@fedspan.register
@dataclass(frozen=True, kw_only=True)
class Half(fedspan.Compressor):
    def compress(self, v, keys):
        return Encoded(values=v / 2)

    def decompress(self, encoded, n, keys, dtype):
        return encoded.values

    def omega(self, n):
        return 0.25
'''


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for known in registry._known.values():
        known.pop("mine", None)
    sys.modules.pop("mine", None)


def checked(path: Path, text: str, *options: str) -> tuple[int, str]:
    (path / "mine.py").write_text(text)
    done = CliRunner().invoke(
        app, ["check-method", str(path / "mine.py"), *options], standalone_mode=False
    )
    if done.exception is not None:
        raise done.exception
    return int(done.return_value), " ".join(done.output.split())


def test_a_good_method_passes_every_law(tmp_path: Path) -> None:
    code, text = checked(tmp_path, EXAMPLE.read_text())
    assert (code, "method mine: 21 of 21 laws hold" in text, "FAIL" in text) == (0, True, False)
    assert "on a small regression the loss falls" not in text
    assert checked(tmp_path, EXAMPLE.read_text(), "--verbose")[1].count("pass") == 21
    assert "every law holds. Laws are about form and safety" in text


def test_a_client_state_needs_its_sixth_function(tmp_path: Path) -> None:
    """It runs in the simulator, and every law but that one holds; on Flower it would be refused."""
    code, text = checked(tmp_path, DRIFT)
    assert code == 1
    told = "clients of Drift keep pull, and nothing says what a reply does to that; define update_client_state"
    assert told in text
    assert text.count("not tried: it needs update_client_state") == 4
    assert text.endswith("1 law does not hold")
    for key in ("mu", "method.mu"):  # as in a spec
        assert checked(tmp_path, DRIFT + SIXTH, "--set", f"{key}=0.5")[0] == 0
    code, text = checked(tmp_path, DRIFT + SIXTH.replace("0.5 * ", ""))
    assert code == 1
    assert "update_client_state gives another 'pull' than client_step" in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rnd.mean(up.dy)", "up.dy.mean(1)", "returns x of shape (2, 2, 24) instead of (2, 1, 24)"),
        (
            "rnd.mean(up.dy)",
            "up.dy[:, :1]",
            "server_step gives another 'x' for replies in another order",
        ),
        (
            "return server.replace(x=server.x + ",
            "server.x.add_(1.0)\n        return server.replace(x=server.x + ",
            "in place",
        ),
        (
            "return client, Bundle(dy=y - x)",
            "return client, Bundle(dy=y - x + torch.rand(()))",
            "two runs of one seed differ",
        ),
        (
            "return client, Bundle(dy=y - x)",
            "return client, Bundle(dy=(y - x)[..., :5])",
            "RuntimeError",
        ),
        ("server.x + rnd.mean", "server.x - rnd.mean", "look for a wrong sign"),
        ("self.mu * (y - x)", "-200 * (y - x)", "look for a wrong sign"),
        ("rnd.mean(up.dy)", "0.001 * rnd.mean(up.dy)", "33.01 at the start and 14.25"),
        (
            "return client, ",
            "return Bundle(n=x), ",
            "client_step returns a state with n, init_client with none",
        ),
    ],
)
def test_a_mistake_is_said_in_words(old: str, new: str, words: str, tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("import fedspan\n", "import fedspan\nimport torch\n", 1)
    assert old in text
    code, said = checked(tmp_path, text.replace(old, new))
    assert code == 1
    assert words in said


UPLINK = '''
"""Clipped values."""
from dataclasses import dataclass
import fedspan


@fedspan.register
@dataclass(frozen=True)
class Clipped(fedspan.Uplink):
    s: float = 2.0

    def send(self, v, client, P):
        return v.clamp(-self.s, self.s), {}
'''
SERVER = '''
"""A rule with a step of its own."""
from dataclasses import dataclass
import fedspan


@fedspan.register
@dataclass(frozen=True)
class Own(fedspan.Server):
    def step(self, server, direction, P, rnd, each):
        return 0.5 * direction, {}
'''


@pytest.mark.parametrize(
    ("old", "new", "name"), [("def send(", "def clip(", "clip"), ("s: float = 2.0", "s = 2.0", "s")]
)
def test_a_name_that_is_neither_function_nor_setting(
    old: str, new: str, name: str, tmp_path: Path
) -> None:
    """The base class would hide a misspelled function, and a setting without a type could not be set."""
    with pytest.raises(SpecError, match=f"'{name}' of Clipped is no function of an uplink"):
        checked(tmp_path, UPLINK.replace(old, new))
    assert checked(tmp_path, UPLINK)[0] == 0


def test_a_step_size_that_is_ignored(tmp_path: Path) -> None:
    code, said = checked(tmp_path, SERVER)
    assert (code, "multiply by self.lr" in said) == (1, True)


RMS = '''
"""A root mean square."""
from dataclasses import dataclass
import torch
import fedspan


@fedspan.register
@dataclass(frozen=True)
class Rms(fedspan.Server):
    def init(self, x0):
        return {"v": torch.zeros_like(x0)}

    def step(self, server, direction, P, rnd, each):
        v = 0.9 * (P @ server.v) + 0.1 * direction**2
        return self.lr * direction / (v.sqrt() + 1e-3), {"v": P.T.put(v, server.v)}
'''
HELD = '''
"""What was not sent is sent later."""
from dataclasses import dataclass
import torch
import fedspan
from fedspan.uplinks._compressed import Compressed


@fedspan.register
@dataclass(frozen=True)
class Held(Compressed):
    private = ("e",)
    needs_no_controls = "controls remember it already"

    def init_client(self, x0):
        return {"e": torch.zeros_like(x0)}

    def send(self, v, client, P):
        w = v + P @ client.e
        return w, {"e": P.T.put(w, client.e)}

    def after(self, client, v, P):
        return {"e": P.T.plus(v, client.e, sign=-1)}
'''


def test_squares_in_a_gaussian_space_are_noticed(tmp_path: Path) -> None:
    """In coordinates every law holds."""
    code, text = checked(tmp_path, RMS, "--set", "lr=0.01")
    assert code == 1
    good, wrong = text.split("server mine in subavg in a gaussian space")
    assert "FAIL" not in good
    assert "with method.lr = 0.02 and server.lr = 0.01 the loss is nan" in wrong
    assert "better steps by --set method.lr=… and --set server.lr=…" in wrong


def test_settings_around_a_choice(tmp_path: Path) -> None:
    text = RMS.replace("(v.sqrt() + 1e-3)", "1e6")
    code, said = checked(tmp_path, text, "--set", "method.lr=0.03", "--set", "server.lr=0.5")
    assert (code, "method.lr = 0.03 and server.lr = 0.5 the loss" in said) == (1, True)


def test_a_private_part_is_named_by_its_function(tmp_path: Path) -> None:
    code, text = checked(tmp_path, HELD.replace('private = ("e",)', ""))
    assert code == 1
    assert "part 'e' is not renewed in `after`; compute it there or name it in `private`" in text
    code, text = checked(tmp_path, HELD.replace('("e",)', '("ee",)'))
    assert code == 1
    assert "`private` names 'ee', which `init_client` does not return" in text


def test_the_first_wrong_shape_ends_the_check(tmp_path: Path) -> None:
    wrong = RMS.replace("self.lr * direction", "self.lr * (P.T @ direction)").replace(
        "+ 1e-3", "+ 1"
    )
    code, text = checked(tmp_path, wrong.replace("(v.sqrt() + 1)", "2"))
    assert (code, text.count("FAIL"), "gaussian" in text) == (1, 1, False)
    assert (
        "`step` returned a move of shape (2, 1, 24); it must be (2, 1, 2), that of `direct" in text
    )


def test_modules_beside_a_file_and_other_plugins(tmp_path: Path) -> None:
    (tmp_path / "beside_mine.py").write_text("BETA = 0.5\n")
    (tmp_path / "other.py").write_text(UPLINK.replace("Clipped", "Other"))
    text = UPLINK.replace("import fedspan\n", "import fedspan\nfrom beside_mine import BETA\n")
    try:
        code, _ = checked(tmp_path, text, "--plugin", str(tmp_path / "other.py"))
        assert code == 0
        assert "other" in registry.choices("uplink")
        assert str(tmp_path) not in sys.path
    finally:
        registry._known["uplink"].pop("other", None)
        for name in [name for name in sys.modules if name.endswith(("other", "beside_mine"))]:
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def test_a_compressor_that_promises_too_much(tmp_path: Path) -> None:
    code, text = checked(tmp_path, HALF)
    assert code == 1
    assert "it says omega = 0.25, and its mean is biased" in text
    assert "3 of 4 laws hold" in text


PARTS = [
    pytest.param(kind, {"name": name} | more, law, id=f"{name}-{law.__name__}")
    for kind, laws in part_laws.LAWS.items()
    for name, cls in registry.choices(kind).items()
    if cls.__module__.startswith("fedspan.")
    for more in [
        {"outer": "qsgd", "inner": "randk"}
        if name == "compose"
        else {"rank": 0.3}
        if kind == "projector"
        else {}
    ]
    for law in laws
]


@pytest.mark.parametrize(("kind", "table", "law"), PARTS)
def test_fedspans_own_parts_keep_the_laws(kind: str, table: dict[str, Any], law: Any) -> None:
    law(tables.build(kind, {"name": "identity"} if table["name"] == "identity" else table))
