"""Figures that are quoted from the pages of measurements: those pages are written anew, and what quotes them is not."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from quire.models.registry import described_models

ROOT = Path(__file__).parents[2]
PAGES = ("performance.md", "performance-zen4.md")
ENGINES = {"Quire": "quire", "vLLM CPU": "vllm-cpu", "OpenVINO GenAI": "openvino-genai", "llama.cpp": "llama.cpp"}
FORMATS = ("bfloat16", "int8", "int4")
OTHERS = {"vLLM": "vllm-cpu", "OpenVINO": "openvino-genai", "llama.cpp": "llama.cpp"}


def measured(page: str, section: str) -> list[list[str]]:
    """The cells of all tables of a section."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {section}$(.*?)^#", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {section}"
    rows = [line for line in found[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def speeds(section: str, engine: str) -> list[float]:
    """Tokens per second with 1, 8 and 32 prompts."""
    rows = [cells for cells in measured("performance.md", section) if cells[1] == engine]
    return [float(cells[2]) for cells in rows if re.fullmatch(r"\d+ x 128 / 64", cells[0])]


def test_the_table_of_the_readme_has_the_figures_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, engine in ENGINES.items():
        (row,) = re.findall(rf"^\| \**{re.escape(name)}\** \|(.*)\|$", readme, re.MULTILINE)
        for cell, section in zip(row.split("|"), (*FORMATS, "Sampled tokens"), strict=False):
            if figures := [float(figure) for figure in re.findall(r"[\d.]+", cell)]:
                assert figures == pytest.approx(speeds(section, engine), rel=5e-3, abs=0.51), (name, section)


def test_the_tutorial_of_a_million_rows_counts_with_the_figures_of_the_page() -> None:
    page = (ROOT / "docs" / "tutorials" / "batch-a-million-rows.md").read_text(encoding="utf-8")
    found = re.search(
        r"(\d+) tokens per second in bfloat16 and (\d+) in int8 .* take (\d+) hours in b", page, re.DOTALL
    )
    assert found
    bfloat16, int8 = (speeds(section, "quire")[2] for section in FORMATS[:2])
    assert [int(each) for each in found.groups()] == [round(bfloat16), round(int8), round(64e6 / bfloat16 / 3600)]


def test_the_products_on_the_page_about_cpus_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "which-cpu.md").read_text(encoding="utf-8")
    rows = [cells for cells in measured("performance.md", "Other instruction sets") if cells[3:5] == ["4096", "4096"]]
    quoted_rows = re.findall(r"^\| `(\w+)` \| AMD Zen 5 \| products: (.*?) \|", page, re.MULTILINE)
    assert [kernels for kernels, _ in quoted_rows] == ["avx512_vnni", "avx512", "avx_vnni", "avx2", "portable"]
    for kernels, shares in quoted_rows:
        for form, *figures in re.findall(r"(\w+) ([\d.]+), ([\d.]+)", shares):
            found = [float(row[-1]) for row in rows if row[:2] == [kernels, form] and row[2] in ("1", "8")]
            assert [float(figure) for figure in figures] == pytest.approx(found, abs=6e-3), (kernels, form)


@pytest.mark.parametrize(("machine", "page"), [("Zen 5", "performance.md"), ("Zen 4", "performance-zen4.md")])
def test_the_shares_and_ratios_on_the_page_about_cpus_are_those_of_the_pages(machine: str, page: str) -> None:
    text = (ROOT / "docs" / "how-to" / "which-cpu.md").read_text(encoding="utf-8")
    (cells,) = re.findall(rf"^\| `avx512_bf16` \| AMD {machine} \| (.*?) \| (.*?) \|", text, re.MULTILINE)
    quotes = [(form, "quire", 5, figures) for form, *figures in re.findall(r"(\w+) ([\d.]+), ([\d.]+)", cells[0])]
    for peer, *figures in re.findall(r"([\w, .]+): ([\d.]+\d), ([\d.]+\d)", cells[1].replace("; ", ". OpenVINO, ")):
        engine, form = peer.removeprefix(". ").split(", ")
        quotes.append(("int4" if form == "Q4_K_M" else form, OTHERS[engine], 4, figures))
    assert len(quotes) == 7
    for form, engine, column, figures in quotes:
        rows = [cells for cells in measured(page, form) if cells[1] == engine]
        assert figures == [cells[column] for cells in rows[:2]], (form, engine)


def test_the_shares_of_quire_models_are_those_of_the_pages() -> None:
    shares = {kind.name: kind.share for _, _, kind, _ in described_models()}
    for section in FORMATS[:2]:
        rows = [cells for page in PAGES for cells in measured(page, section)]
        assert quoted(shares["dense"], section) == bounds(
            row[5] for row in rows if row[:2] == ["1 x 128 / 64", "quire"]
        )
        rows = [cells for page in PAGES for cells in measured(page, "Embeddings")]
        assert quoted(shares["encoder"], section) == bounds(row[3] for row in rows if row[:2] == ["quire", section])
    rows = [
        cells for page in ("performance.md", "performance-xeon.md") for cells in measured(page, "A mixture of experts")
    ]
    assert quoted(shares["mixture"], "int4") == bounds(row[3] for row in rows if row[0] == "quire" and len(row) == 4)


def quoted(share: str, form: str) -> list[float]:
    found = re.search(rf"{form} ([\d.]+)(?: to ([\d.]+))?", share)
    assert found
    return sorted({float(each) for each in found.groups() if each})


def bounds(figures: Iterable[str]) -> list[float]:
    values = [round(float(figure), 2) for figure in figures]
    return sorted({min(values), max(values)})
