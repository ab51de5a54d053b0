"""The site: every page has its place, every figure and the reference are those that their script makes."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

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


def test_every_page_is_in_the_navigation_or_linked_from_the_evidence_and_every_entry_is_a_page() -> None:
    navigation, _, aside = (ROOT / "mkdocs.yml").read_text().partition("not_in_nav:")
    listed = re.findall(r": ([\w/-]+\.md)", navigation)
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (DOCS / "evidence.md").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}

    assert len(set(listed)) == len(listed)
    assert set(listed) <= pages
    for page in pages - set(listed):
        assert page in linked
        assert page in aside or page.startswith("design/")


def test_figures_and_reference_are_up_to_date() -> None:
    for name, svg in script("make_figures").figures().items():
        assert (DOCS / "figures" / f"{name}.svg").read_text() == svg, "run: PYTHONPATH=. python docs/make_figures.py"
    drawn = script("make_picture").picture()
    assert (DOCS / "figures" / "layouts.svg").read_text() == drawn, "run: PYTHONPATH=. python docs/make_picture.py"
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


WORDS = {
    "which": "which strategy, mixture of experts, MoE, FP8, CPU offload, MFU",
    "launch": "multi-node, SLURM, torchrun, reproducibility, seed",
    "ported": "DDP, FSDP, ZeRO, Megatron, DeepSpeed",
    "parallelize": "data parallelism, tensor parallelism, sequence parallelism, context parallelism",
    "pipeline": "pipeline parallelism",
    "train": "mixed precision, gradient accumulation, gradient checkpointing, gradient clipping, EMA, CUDA graphs",
    "huggingface": "LoRA, Hugging Face Trainer",
    "trainers": "Lightning",
    "checkpoint": "checkpoint",
    "compile": "torch.compile",
    "explain": "profiling",
    "gpu": "NCCL",
    "strategies": "FlashAttention",
    "semantics": "dropout, batch norm",
    "reshard": "resharding",
    "switch": "DTensor",
    "troubleshooting": "hang, out of memory",
}
"""What people type into the search, by the page that answers."""


def stems(text: str) -> list[str]:
    return [re.sub(r"(ing|s)$", "", word) for word in re.findall(r"[\w.]+", text.lower())]


def found_first(words: str, tags: dict[str, list[str]]) -> list[str]:
    """The pages of the best score by their tags (BM25, as in lunr), which the site's search puts before all else."""
    mean = sum(map(len, tags.values())) / len(tags)
    scores = dict.fromkeys(tags, 0.0)
    for word in stems(words):
        with_it = sum(word in of for of in tags.values())
        rarity = math.log(1 + (len(tags) - with_it + 0.5) / (with_it + 0.5))
        for page, of in tags.items():
            count = of.count(word)
            scores[page] += rarity * 2.2 * count / (1.2 * (0.25 + 0.75 * len(of) / mean) + count)
    return [page for page, score in scores.items() if score == max(scores.values()) > 0]


@pytest.mark.parametrize(("page", "words"), WORDS.items())
def test_each_word_of_the_field_finds_the_page_that_answers_first(page: str, words: str) -> None:
    tagged = {
        each.stem: re.match(r"---\n(?:hide: .*\n)?tags: \[(.*)\]\n---\n", each.read_text())
        for each in DOCS.glob("*.md")
    }
    tags = {name: stems(match[1]) for name, match in tagged.items() if match}
    text = re.sub(r"^---\n(.*\n)+?---\n", "", (DOCS / f"{page}.md").read_text()).lower()

    for word in words.split(", "):
        assert found_first(word, tags) == [page], word
        assert all(stem in text for stem in stems(word)), f"{word} is a tag of {page}, which does not speak of it"


def test_each_design_note_is_named_by_the_mechanism_that_it_explains() -> None:
    files = [path.read_text() for path in Path(dshard.__file__).parent.rglob("*.py")]
    named = {name for text in files for name in re.findall(r"docs/design/(\d{4}[\w-]*\.md)", text)}

    assert named == {path.name for path in (DOCS / "design").glob("0*.md")}


@pytest.mark.parametrize(
    "page", [*(DOCS / "design").glob("*.md"), ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_files_that_a_note_names_are_there(page: Path) -> None:
    named = re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())

    assert [name for name in named if not ((ROOT / "dshard" / name).exists() or (ROOT / name).exists())] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
