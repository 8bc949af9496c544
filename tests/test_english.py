"""Words that readers stumble over stay out of docs, help texts and messages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNTED = "clients?|bytes|numbers?|steps?|rounds|time|seconds|once|examples|batch(?:es)?|texts?"
BRITISH = (
    "optimiser|colour|behaviour|neighbour|favour|centre|normalis|quantis|tokenis|initialis|serialis"
)
FORBIDDEN = {
    rf"\b(?:{COUNTED}) a (?:round|client|run|seed|row|step|class|method)\b": "per",
    r"\ba line a\b": "one line per",
    r"\bgo(?:es)? whole\b": "is sent in full",
    r"\b(?:sent|trained|kept) whole\b": "in full",
    r"\bunless it is said\b": "by default",
    r"\bin hand\b": "the current one, or the best so far",
    r"\bletters?\b": "message",
    r"\bsites?\b": "client",
    r"\bcentre\b": "server",
    r"\baside\b": "buffers",
    r"\bcarried out\b": "run",
    r"\bwhat comes of it\b": "Results",
    r"\btwenty lines\b": "Quickstart",
    rf"\b(?:{BRITISH})\w*": "American spelling",
    r"\bcovered (?:layers?|weights?)\b": "fused",
    r"\bat a site\b": "on a client",
}
ALLOWED = {
    r"\bletters?\b": ("the paper's letters",),
    r"\baside\b": ("|Aside|",),  # a stage direction
    r"\bsites?\b": ("documentation site", "docs/site", "out/site"),
}


def texts() -> list[tuple[str, str]]:
    """(where, text) of the docs and of every docstring and message of the package."""
    found = [
        (str(p.relative_to(ROOT)), p.read_text())
        for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    ]
    found = [(name, text) for name, text in found if name != "CHANGELOG.md"]
    for path in sorted((ROOT / "src").rglob("*.py")):
        strings = [
            n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        ]
        comments = re.findall(r"(?<!['\"])#\s(.*)", path.read_text())
        found.append(
            (
                str(path.relative_to(ROOT)),
                "\n".join([s for s in strings if isinstance(s, str)] + comments),
            )
        )
    return found


@pytest.mark.parametrize(("pattern", "instead"), FORBIDDEN.items(), ids=list(FORBIDDEN.values()))
def test_readers_do_not_stumble(pattern: str, instead: str) -> None:
    stumbles = []
    for where, text in texts():
        for phrase in ALLOWED.get(pattern, ()):
            text = text.replace(phrase, "")
        stumbles += [
            f"{where}: {found[0]!r}, say {instead!r}"
            for found in re.finditer(pattern, text, re.IGNORECASE)
        ]
    assert not stumbles, "\n".join(stumbles[:20])


def test_docs_have_short_lines() -> None:
    """At most 100 characters, but for tables, links and code."""
    long = []
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")]):
        in_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            in_code ^= line.startswith("```")
            plain = not (
                in_code or line.startswith(("|", "    ", "!", "```")) or "](" in line or "`" in line
            )
            if plain and len(line) > 100:
                long.append(f"{path.name}:{number}")
    assert not long, ", ".join(long[:20])
