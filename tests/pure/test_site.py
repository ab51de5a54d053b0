"""The site: every page has its place, every figure and the reference are those that their script makes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_figures", DOCS / "make_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())

    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_figures_and_reference_are_up_to_date() -> None:
    made = maker()

    for name, svg in made.figures().items():
        assert (DOCS / "figures" / f"{name}.svg").read_text() == svg, "run: PYTHONPATH=. python docs/make_figures.py"
    assert (DOCS / "reference.md").read_text() == made.reference(), "run: PYTHONPATH=. python docs/make_figures.py"


def test_captions_are_the_layouts_of_their_figures() -> None:
    concepts = (DOCS / "concepts.md").read_text()
    layouts = {name: text for name, (text, _) in maker().FIGURES.items()}

    shown = re.findall(r"!\[([^\]]*)\]\(figures/(\w+)\.svg\)", concepts)
    assert {name for _, name in shown} == set(layouts)
    assert all(caption.startswith(layouts[name]) for caption, name in shown)


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
