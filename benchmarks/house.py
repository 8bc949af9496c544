"""How heavy the house is: code tokens, classes, refusals of combinations, files that a round and a comparison cross.

    python benchmarks/house.py

Tokens are those of Python's tokenizer without comments and docstrings. A file is crossed if one of its functions is
called; importing it does not count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import Any

import torch
import walk

import fedspan
from fedspan.core import refusals

SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def weigh(root: Path = walk.ROOT) -> dict[str, float]:
    """Return files, code lines, tokens, tokens per line and classes below a folder."""
    files = tokens = code = classes = 0
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        prose: set[int] = set()
        for node in ast.walk(tree):
            classes += isinstance(node, ast.ClassDef)
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        used: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in SKIPPED and token.start[0] not in prose:
                tokens += 1
                used.update(range(token.start[0], token.end[0] + 1))
        files, code = files + 1, code + len(used)
    return {
        "files": files,
        "code lines": code,
        "tokens": tokens,
        "tokens per line": tokens / code,
        "classes": classes,
    }


def refused() -> int:
    """Return how many combinations are refused: reasons against a run, and against choices of one method."""
    source = Path(refusals.__file__).read_text("utf-8")
    functions = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)]
    return sum(
        isinstance(inner, ast.Raise | ast.Yield)
        for one in functions
        if one.name != "check"
        for inner in ast.walk(one)
    )


class _Began(Exception):  # noqa: N818 (no error)
    """The first run of a comparison is about to begin."""


def before_first_run() -> int:
    """Return the files that `compare` crosses before its first run."""
    seen: set[str] = set()

    def note(frame: Any, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or walk.ROOT not in path.parents:
            return
        if path.name == "run.py" and path.parent.name == "api":
            raise _Began
        if frame.f_code.co_name != "<module>" and path.name != "namespace.py":
            seen.add(str(path.relative_to(walk.ROOT)))

    method = {"name": "ssf", "lr": 0.01, "local_steps": 5, "rank": 20}
    spec = {
        "rounds": 2,
        "clients_per_round": 10,
        "batch_size": 20,
        "method": method,
        "task": {"name": "regression"},
    }
    sys.setprofile(note)
    try:
        fedspan.compare(["ssf", "scaffold"], spec, seeds=1, progress=False)
    except _Began:
        pass
    finally:
        sys.setprofile(None)
    return len(seen)


def main() -> None:
    """Print one line per figure."""
    torch.set_num_threads(1)
    for name, value in weigh().items():
        print(f"{name:36} {value:,.2f}" if isinstance(value, float) else f"{name:36} {value:,}")
    print(f"{'refusals of combinations':36} {refused()}")
    print(f"{'files of a round of SSF in run':36} {len(walk.of_run())}")
    print(f"{'files of a round of SSF in fit':36} {len(walk.of_fit())}")
    print(f"{'files of compare before its first run':36} {before_first_run()}")


if __name__ == "__main__":
    main()
