"""The site: every page has its place, every figure and the reference are those that their script makes."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import dshard

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())

    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_figures_and_reference_are_up_to_date() -> None:
    for name, svg in script("make_figures").figures().items():
        assert (DOCS / "figures" / f"{name}.svg").read_text() == svg, "run: PYTHONPATH=. python docs/make_figures.py"
    made = script("make_reference").reference()
    assert (DOCS / "reference.md").read_text() == made, "run: PYTHONPATH=. python docs/make_reference.py"


def test_the_reference_has_every_public_name_once() -> None:
    reference = script("make_reference")
    paths = reference.paths()
    assert len(set(paths)) == len(paths)
    modules = [dshard, *(importlib.import_module(f"dshard.{name}") for name in reference.WHOLE)]

    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            assert any(reference.value_at(path) is value for path in paths) or value is dshard.DeviceMesh, name


def test_every_name_that_a_page_imports_has_an_anchor_in_the_reference() -> None:
    anchors = set(re.findall(r'^::: (.*)$|<a id="(.*?)">', (DOCS / "reference.md").read_text(), re.MULTILINE))
    unknown = [
        f"{page.name}: {module}.{name}"
        for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]
        for module, names in re.findall(
            r"^\s*from (dshard[\w.]*) import (\([^)]*\)|.*)$", page.read_text(), re.MULTILINE
        )
        for name in re.findall(r"\w+", re.sub(r"#.*", "", names))
        if not {(f"{module}.{name}", ""), ("", f"{module}.{name}")} & anchors
    ]

    assert unknown == []


def test_first_lines_of_docstrings_stand_alone() -> None:
    reference = script("make_reference")

    for path in reference.paths():
        line = reference.first_line(path)
        assert line
        assert not line.startswith(("What ", "The same", "Whether ")), f"{path}: {line}"


def test_captions_are_the_layouts_of_their_figures() -> None:
    concepts = (DOCS / "concepts.md").read_text()
    layouts = {name: text for name, (text, _) in script("make_figures").FIGURES.items()}

    shown = re.findall(r"!\[([^\]]*)\]\(figures/(\w+)\.svg\)", concepts)
    assert {name for _, name in shown} == set(layouts)
    assert all(caption.startswith(layouts[name]) for caption, name in shown)


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
