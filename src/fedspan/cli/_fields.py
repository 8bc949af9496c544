"""The settings of a dataclass in words: name, type, default, and the comment or docstring entry of the field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import tokenize

Row = tuple[str, str, str, str]
MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])")
PARAMETERS = re.compile(r"\[Any(?:, Any)*\]")


def settings(cls: type) -> list[Row]:
    """(name, type, default, description) of every field that a spec can set."""
    if not dataclasses.is_dataclass(cls):
        return []
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        words |= described(base)
    fields = [one for one in dataclasses.fields(cls) if one.init and not one.name.startswith("_")]
    return [(one.name, _type(one.type), _default(one), words.get(one.name, "")) for one in fields]


def described(cls: type) -> dict[str, str]:
    """Field → description, from the class's own source and docstring."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in read if token.type == tokenize.COMMENT}
    own = [node for node in body.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    found = {node.target.id: comments[node.end_lineno] for node in own if node.end_lineno in comments}  # type: ignore[union-attr]
    return _args(cls.__dict__.get("__doc__") or "") | found


def _args(docstring: str) -> dict[str, str]:
    """The entries of a docstring's `Args:`; one entry may be of several names."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(docstring), re.M)
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _type(hint: object) -> str:
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    return PARAMETERS.sub("", MODULES.sub("", text)).replace(" | None", "")


def _default(one: dataclasses.Field[object]) -> str:
    if one.default_factory is not dataclasses.MISSING:
        made = one.default_factory()
        return f"{type(made).__name__}()" if dataclasses.is_dataclass(made) else repr(made)
    return "required" if one.default is dataclasses.MISSING else repr(one.default)
