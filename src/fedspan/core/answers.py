"""What the functions of a choice on an axis return, checked in the first two rounds of a run.

A wrong shape can be broadcast to a wrong result without an error, and others end in a traceback of fedspan's own code.
`fedspan.methods.box` calls the choices through `checked` at first, and without it later: a round costs nothing more.
"""

from __future__ import annotations

import inspect
import traceback
from types import SimpleNamespace
from typing import Any

import torch

from fedspan.core.bundle import MissingPartError
from fedspan.core.errors import FormError, SpecError, did_you_mean, one_line, shown
from fedspan.core.registry import KINDS, is_registered, name_of

AXES = ("drift", "uplink", "server", "downlink")
# function → what the vector that it returns is, and the argument whose shape it has
VECTORS = {"step": ("move", "direction"), "mean": ("mean", "v"), "direction": ("direction", "v")}
PAIRS = ("step", "mean", "send")  # these return a vector and parts
NEW = ("init", "init_server", "init_client", "down", "reply")  # these return parts that are new
STATES = ("after", "server", "sent", "rest", *PAIRS)  # these return parts of a state that exist
RESERVED = ("x", "sync", "probe", "squares")  # parts of a download that are not the drift's


def checked(method: Any) -> Any:
    """Return the choices of a method, each of whose functions checks what it returns."""
    return SimpleNamespace(**{axis: Checked(axis, getattr(method, axis)) for axis in AXES})


class Checked:
    """A choice on an axis whose functions raise FormError if they return something of another form."""

    def __init__(self, axis: str, choice: Any) -> None:
        self.axis, self.choice = axis, choice
        name = name_of(choice) if is_registered(choice) else type(choice).__name__
        self.named = f"`{axis}` {name!r}"

    def __getattr__(self, name: str) -> Any:
        function, base = getattr(self.choice, name), getattr(KINDS[self.axis], name, None)
        if not inspect.ismethod(function) or base is None:
            return function
        names = [*inspect.signature(base).parameters][1:]

        def call(*arguments: Any) -> Any:
            given = dict(zip(names, arguments, strict=False))
            answer = self._call(name, function, arguments, given.get("P"))
            return self._check(name, answer, given)

        return call

    def _call(self, name: str, function: Any, arguments: Any, P: Any = None) -> Any:
        """Call a function; what a user's own code raises becomes one line."""
        if type(self.choice).__module__.startswith("fedspan."):
            return function(*arguments)
        where = f"{self.named}: `{name}`"
        try:
            return function(*arguments)
        except MissingPartError as error:
            raise MissingPartError(f"{where}: {error}") from error
        except (SpecError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            file = getattr(getattr(function, "__code__", None), "co_filename", "")
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == file]
            sizes = ""
            if P is not None and not P.whole:
                sizes = (
                    f"; states have d = {P.layout.size} values, vectors inside the subspace r = {P.rank}, and "
                    "`P @ state` goes from d to r"
                )
            place = f" in line {lines[-1]}" if lines else ""
            raise FormError(f"{where} fails{place}: {one_line(error, 200)}{sizes}") from error

    def _check(self, name: str, answer: Any, given: dict[str, Any]) -> Any:
        """Return what a function has returned, if it has the right form."""
        where, like = f"{self.named}: `{name}` returned", None
        if name == "plus":
            return self._plus(where, answer, given["P"])
        if name == "watch" and not callable(answer):
            raise FormError(f"{where} {_kind(answer)}; it must return a function of the point")
        what, source = VECTORS.get(name, ("vector", "v" if self.axis == "uplink" else "move"))
        parts = answer
        if name in PAIRS:
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise FormError(
                    f"{where} {_kind(answer)}; it must return a pair: the {what}, and a dictionary of parts ({{}} for "
                    "none)"
                )
            like, parts = answer
        elif name == "direction":
            like = answer
        if name in VECTORS or name in PAIRS:
            runs, clients, size = given[source].shape
            wanted = (runs, 1 if name == "mean" else clients, size)
            if not isinstance(like, torch.Tensor):
                raise FormError(
                    f"{where} {_kind(like)} as the {what}; it must be a tensor {wanted}"
                )
            if tuple(like.shape) != wanted:
                whose = f"one client's `{source}`" if name == "mean" else f"`{source}`"
                raise FormError(
                    f"{where} a {what} of shape {tuple(like.shape)}; it must be {wanted}, that of {whose}"
                )
        if name in NEW or name in STATES:
            if not isinstance(parts, dict):
                raise FormError(
                    f"{where} {_kind(parts)}; it must return a dictionary of parts, {{}} for none"
                )
            if name in NEW:
                self._new_parts(name, where, parts, given)
            else:
                self._state_parts(name, where, parts, given)
        return answer

    def _plus(self, where: str, plus: Any, P: Any) -> Any:
        """Return what is added to gradients; a function of the point checks its value."""
        if plus is None:
            return None
        if isinstance(plus, torch.Tensor):
            if plus.dim() != 3 or plus.shape[-1] != P.rank:
                raise FormError(
                    f"{where} a tensor of shape {tuple(plus.shape)}; it must be (runs, clients, {P.rank}), or a "
                    "function of the point"
                )
            return plus
        if not callable(plus):
            raise FormError(
                f"{where} {_kind(plus)}; it must return a tensor (runs, clients, {P.rank}), a function of the "
                "point, or None"
            )

        def at(y: Any) -> Any:
            value = self._call("plus", plus, (y,), P)
            if not isinstance(value, torch.Tensor) or value.shape[-1:] != y.shape[-1:]:
                what = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else _kind(value)
                raise FormError(
                    f"{where} a function whose value is {what}; it must be a tensor {tuple(y.shape)}, as the point is"
                )
            return value

        return at

    def _new_parts(self, name: str, where: str, parts: Any, given: dict[str, Any]) -> None:
        """Check the parts of a first state, a download or a reply."""
        first, taken = (
            name.startswith("init"),
            RESERVED if (self.axis, name) == ("drift", "down") else (),
        )
        for part, value in parts.items():
            if part in taken or (first and part == "x"):
                raise FormError(
                    f"{where} a part {part!r}, which is the name of the model's own; rename it"
                )
            tensor = isinstance(value, torch.Tensor)
            if not tensor and self.axis != "downlink":
                raise FormError(
                    f"{where} {_kind(value)} as part {part!r}; a part is a tensor (runs, clients, size)"
                )
            if tensor and value.dim() != 3:
                raise FormError(
                    f"{where} a part {part!r} of shape {tuple(value.shape)}; it must be (runs, clients, size)"
                )
        if name == "reply":
            wanted, v = tuple(given["came"].shape), parts.get("v")
            if v is None:
                has = ", ".join(parts) or "no parts"
                raise FormError(f"{where} {has}; it must have a part 'v', which the uplink sends")
            if tuple(v.shape) != wanted:
                raise FormError(
                    f"{where} 'v' of shape {tuple(v.shape)}; it must be {wanted}, that of `came`"
                )
        if name == "init_client":
            for own in getattr(self.choice, "private", ()):
                if own not in parts:
                    raise FormError(
                        f"{self.named}: `private` names {own!r}, which `init_client` does not return"
                        f"{did_you_mean(own, parts)}; it has {', '.join(parts) or 'none'}"
                    )

    def _state_parts(self, name: str, where: str, parts: Any, given: dict[str, Any]) -> None:
        """Check that parts take the place of parts of the first state, and have their form."""
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in parts.values()):
            return  # a rehearsal, which counts every tensor that is made
        side = "client" if "client" in given else "server"
        init = "init" if self.axis in ("server", "downlink") else f"init_{side}"
        layout = given["P"].layout
        x0 = torch.empty(1, 1, layout.size, dtype=layout.dtype, device="meta")
        first, state = getattr(self.choice, init)(x0), given.get(side)
        for part, value in parts.items():
            if part not in first:
                raise FormError(
                    f"{where} a part {part!r}, which `{init}` does not have{did_you_mean(part, first)}; return its "
                    "first value there"
                )
            old = None if state is None else state.get(part)
            if not isinstance(old, torch.Tensor):
                continue
            if not isinstance(value, torch.Tensor):
                raise FormError(f"{where} {_kind(value)} as part {part!r}; it must be a tensor")
            if (value.shape, value.dtype) != (old.shape, old.dtype):
                raise FormError(
                    f"{where} a part {part!r} of shape {tuple(value.shape)} and {value.dtype}; it must be "
                    f"{tuple(old.shape)} and {old.dtype}, as `{init}` has it; P.T.put(inside, state) puts r values "
                    "into a state"
                )


def _kind(value: Any) -> str:
    """Return what something is, in words."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {shown(value)}"
