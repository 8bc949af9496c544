"""The API reference has every public name with its arguments, and the pictures are those of their sources."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import api_reference
from support.browsing import browser_page, drawn

ROOT = Path(__file__).parents[1]


@drawn
def test_the_site_is_searched_in_a_folder(tmp_path: Path) -> None:
    """Without a server: a page of the site's own settings, opened as a file."""
    config = pytest.importorskip(
        "mkdocs.config", reason="mkdocs is not installed; pip install 'fedspan[docs]'"
    )
    from mkdocs.commands.build import build

    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# Home\n\nRead on.\n")
    (pages / "deep").mkdir()
    (pages / "deep/other.md").write_text("# Elsewhere\n\nA subspace of few dimensions.\n")
    for name in ("iframe-worker.js", "style.css"):
        shutil.copy(ROOT / "docs" / name, pages)
    changes = {
        "docs_dir": str(pages),
        "site_dir": str(tmp_path / "site"),
        "hooks": [],
        "nav": ["index.md", "deep/other.md"],
    }
    build(config.load_config(str(ROOT / "mkdocs.yml"), **changes))
    for place in ("index.html", "deep/other.html"):
        with browser_page((tmp_path / "site" / place).as_uri()) as page:
            page.locator("input.md-search__input").click()
            page.keyboard.type("subspace")
            page.wait_for_selector(".md-search-result__link", timeout=10_000)
            assert "Elsewhere" in page.inner_text(".md-search-result__list")


def test_every_public_name_is_in_the_reference_with_its_arguments() -> None:
    assert list(api_reference.problems()) == []


def test_the_check_of_the_reference_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(given: int) -> int:
        """Has neither Args nor Returns."""
        return given

    names, pages = (
        api_reference.listed("fedspan") | {"bare": "fedspan.api.fit"},
        api_reference.pages(),
    )
    monkeypatch.setattr(api_reference, "pages", lambda: pages)
    monkeypatch.setattr(
        api_reference, "listed", lambda package: names if package == "fedspan" else {}
    )
    monkeypatch.setattr("fedspan.bare", bare, raising=False)
    found = "\n".join(api_reference.problems())
    assert "fedspan.bare is not in the reference" in found
    assert "fedspan.bare: the argument `given` has no entry in `Args:`" in found
    assert "fedspan.bare does not say what it returns" in found


def test_every_registered_choice_is_in_the_reference() -> None:
    text = "\n".join(api_reference.pages().values())
    for kind in api_reference.registry.KINDS:
        for name in api_reference.registry.choices(kind):
            assert f'`name = "{name}"`' in text, f"{kind} {name}"


def test_every_command_is_in_the_reference() -> None:
    text = api_reference.pages()["reference/command-line.md"]
    assert "## fedspan compare\n" in text
    assert "| `--run-dir PATH` |" in text


@pytest.mark.parametrize(
    "source", sorted((ROOT / "docs/figures").glob("*.mmd")), ids=lambda path: path.stem
)
def test_pictures_are_drawn_from_their_sources(source: Path) -> None:
    """`python docs/figures/render.py` draws them again."""
    drawn = set(
        re.findall(r"[\w./∇ᵀ]+", re.sub(r"<[^>]*>", " ", source.with_suffix(".svg").read_text()))
    )
    labels = re.findall(r'"(.*?)"|\|(\w+)\|', source.read_text())
    words = {
        word
        for label in labels
        for word in re.findall(r"[\w./∇ᵀ]+", re.sub(r"<br>", " ", "".join(label)))
    }
    assert len(words) > 10
    assert not words - drawn


def test_the_picture_of_the_packages_has_all_of_them() -> None:
    """In the order of the layers that `lint-imports` checks."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]["layers"]
    names = [name.rpartition(".")[2] for layer in layers for name in layer.split(" | ")]
    assert {path.parent.name for path in (ROOT / "src/fedspan").glob("*/__init__.py")} == set(names)
    labels = " ".join(re.findall(r'"(.*?)"', (ROOT / "docs/figures/rooms.mmd").read_text()))
    assert not set(names) - set(re.findall(r"\w+", labels))


def test_links_to_headings_work_on_github_too() -> None:
    """The site's own check is `make docs`."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found = 0
    for page in pages:
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            if there.suffix == ".md":
                found += 1
                assert anchor in github_anchors(there.read_text()), (
                    f"{page.name}: {target}#{anchor}"
                )
    assert found > 10


def github_anchors(text: str) -> set[str]:
    """The ids that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }
