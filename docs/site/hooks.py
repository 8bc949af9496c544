"""Hooks of the documentation site: pages that are generated, and links that work on GitHub and on the site alike.

Pages are written for GitHub: links are relative paths in the repository. Here a link to a file outside `docs/` becomes
one to a page that shows the file, and public names in code style become links into the API reference.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))
import api_reference

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("mkdocs.hooks.fedspan")  # a warning fails `mkdocs build --strict`
COPIES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
ORIGINS = {page: source for source, page in COPIES.items()}
ALONE = ("index.md", "tutorial.md", "changelog.md")  # a tab with one page needs no list of pages
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
SHOWN = {".py": "python", ".toml": "toml", ".md": "markdown", ".ini": "ini", ".cff": "yaml"}


def on_config(config: Any) -> Any:
    """Replaces the patterns in the navigation by the pages that they stand for."""
    docs = Path(config.docs_dir)
    there = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    config.nav = [
        _expanded(item, [page for page in there if page not in named], set()) for item in config.nav
    ]
    return config


def _expanded(item: Any, free: list[str], taken: set[str]) -> Any:
    if isinstance(item, dict):
        ((title, inner),) = item.items()
        if inner == "reference/":
            return {title: list(api_reference.pages())}
        return {title: _all(inner, free, taken) if isinstance(inner, list) else inner}
    return item


def _all(items: list[Any], free: list[str], taken: set[str]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, str) and "*" in item:
            depth = item.count("/")
            pages = [
                p
                for p in free
                if fnmatch.fnmatch(p, item) and p.count("/") == depth and p not in taken
            ]
            taken.update(pages)
            found += [{p.split("/")[-2]: p} if depth else p for p in pages]
        else:
            found.append(_expanded(item, free, taken))
    return found


def on_files(files: Files, config: Any) -> Files:
    """Adds the home page, the changelog, the reference, and a page for each file outside `docs/` that is linked to."""
    for problem in api_reference.problems():
        LOG.warning("%s", problem)
    for source, page in COPIES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for page, text in api_reference.pages().items():
        files.append(File.generated(config, page, content=text))
    outside = {
        path
        for file in files.documentation_pages()
        for path in _linked(file)
        if _page_of(path).startswith("source/")
    }
    for path in sorted(outside):
        file = File.generated(config, _page_of(path), content=_shown(ROOT / path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def _origin(page: str) -> str:
    """The path of a page's text in the repository."""
    return ORIGINS.get(page, f"docs/{page}")


def _linked(file: File) -> list[str]:
    """The paths in the repository that a page links to."""
    folder = posixpath.dirname(_origin(file.src_uri))
    return [
        posixpath.normpath(posixpath.join(folder, target))
        for target in LINK.findall(file.content_string)
    ]


def _page_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in COPIES:
        return COPIES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _shown(path: Path) -> str:
    """The page of a file, or of a folder's files, outside `docs/`."""
    if not path.exists():
        LOG.warning("a page links to %s, which does not exist", path)
        return ""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".ipynb":
        return _notebook(path)
    if path.is_file():
        return f"# {name}\n\n{_fenced(path)}"
    inside = sorted(file for file in path.rglob("*") if file.suffix in SHOWN)
    return f"# {name}\n\n" + "\n".join(
        f"## {file.relative_to(path)}\n\n{_fenced(file)}" for file in inside
    )


def _notebook(path: Path) -> str:
    """A notebook as a page; links in its cells are relative to its own folder."""
    folder, depth = (
        path.parent.relative_to(ROOT).as_posix(),
        "../" * len(path.relative_to(ROOT).parts),
    )

    def on_site(target: re.Match[str]) -> str:
        return depth + _page_of(posixpath.normpath(posixpath.join(folder, target[0])))

    cells = [
        (cell["cell_type"], "".join(cell["source"]))
        for cell in json.loads(path.read_text("utf-8"))["cells"]
    ]
    return "\n\n".join(
        f"```python\n{s}\n```" if kind == "code" else LINK.sub(on_site, s) for kind, s in cells
    )


def _fenced(path: Path) -> str:
    return f"````{SHOWN.get(path.suffix, 'text')}\n{path.read_text('utf-8').rstrip()}\n````\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links of the repository into links of the site, and public names into links to the reference."""
    uri = page.file.src_uri
    if uri in ALONE:
        page.meta["hide"] = ["navigation"]
    if uri.startswith(("reference/", "source/")):
        return markdown
    folder = posixpath.dirname(_origin(uri))

    def on_site(target: re.Match[str]) -> str:
        there = _page_of(posixpath.normpath(posixpath.join(folder, target[0])))
        return posixpath.relpath(there, posixpath.dirname(uri) or ".")

    if (ROOT / "docs" / uri).with_name("index.html").exists():
        markdown = re.sub(r"^(# .*\n)", r"\1\n[Interactive page](index.html)\n", markdown, count=1)
    pieces = re.split(r"(^```.*?^```$|^#[^\n]*$)", markdown, flags=re.M | re.S)
    pieces[::2] = [_named(LINK.sub(on_site, _titled(piece))) for piece in pieces[::2]]
    _check_lists("".join(pieces[::2]), uri)
    return "".join(pieces)


def _titled(text: str) -> str:
    """`[docs/networks.md](…)`, which suits a reader of files, with the title of the page in place of its path."""

    def title(found: re.Match[str]) -> str:
        source = ROOT / (
            found[1] if found[1] in COPIES else f"docs/{found[1].removeprefix('docs/')}"
        )
        return (
            f"[{source.read_text('utf-8').partition(chr(10))[0].lstrip('# ')}]"
            if source.exists()
            else found[0]
        )

    return re.sub(r"\[([\w/-]+\.md)\](?=\()", title, text)


def _named(text: str) -> str:
    """`fedspan.fit` and `fedspan plan` as links to where they are described."""
    public = {
        name
        for package in (api_reference.ROOT, *api_reference.namespaces())
        for name in api_reference.public(package)
    }
    commands = api_reference.command_line.commands()

    def link(found: re.Match[str]) -> str:
        name = found[1]
        target = (
            name
            if name in public
            else name.replace(" ", "-")
            if name.removeprefix("fedspan ") in commands
            else ""
        )
        return f"[`{name}`][{target}]" if target else found[0]

    return re.sub(r"(?<![\[`])`(fedspan[. ][\w.]+)`(?!\])", link, text)


def _check_lists(text: str, uri: str) -> None:
    """GitHub and the site agree on a list if it follows a blank line and what is inside an item is indented by four."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        indent = len(line) - len(line.lstrip())
        is_item, follows_text = (
            re.match(r" *(?:[-*]|\d+\.) ", line),
            before.strip() and before[0] not in " -*0123456789",
        )
        if (is_item and (indent % 4 or follows_text)) or (not before.strip() and 0 < indent < 4):
            LOG.warning(
                "%s: put a blank line before a list, and indent what is inside an item by four: %r",
                uri,
                line,
            )


def on_post_build(config: Any) -> None:
    """The site works without a network: no page loads anything from another server."""
    for page in Path(config.site_dir).rglob("*.html"):
        for found in re.findall(
            r'<(?:script|link|img|iframe)[^>]* (?:src|href)="https?://[^"]*"',
            page.read_text("utf-8"),
        ):
            LOG.warning("%s loads %s", page.relative_to(config.site_dir), found)
