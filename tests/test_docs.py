"""The documentation does what it says: its snippets run, its links lead somewhere, the README stays short."""

import doctest
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from nanoinfer import tiny_model_path
from tests.draw_experiments import run_snippets

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def test_the_page_of_ways_to_call_prints_what_it_shows() -> None:
    results = doctest.testfile(str(DOCS / "generate.md"), module_relative=False)
    assert results.attempted > 30
    assert results.failed == 0


def test_the_readmes_python_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert snippets
    for snippet in snippets:
        assert "Qwen/Qwen3-0.6B" in snippet
        exec(snippet.replace("Qwen/Qwen3-0.6B", str(tiny_model_path())), {"__name__": "__main__"})
    assert "312 + 48 = 360" in capsys.readouterr().out


@pytest.mark.parametrize(("title", "shown"), [("Training loops", ""), ("asyncio", "7 + 48 = 55\n8 + 48 = 56")])
def test_the_snippets_of_integrations_run(title: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", (DOCS / "integrations.md").read_text(), re.M | re.S)
    snippets = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(snippet, {"__name__": "__main__"})
    assert capsys.readouterr().out == shown


SHORTENED = {
    "range(96)": "range(12)",
    "random_prompts(96,": "random_prompts(12,",
    "(16, 32, 64, 128, 256)": "(16, 128)",
    "(4, 8, 16, 128)) for _ in range(48)": "(1, 2, 3, 30)) for _ in range(8)",
    "random_prompts(48,": "random_prompts(8,",
    "(0, 128, 256, 512, 1024)": "(0, 128)",
    "(16, 64, 250, 500, 2000, 8000)": "(250, 500)",
    "random_prompts(16, 500, 500)": "random_prompts(3, 500, 500)",
    "lengths(150)": "lengths(80)",
}


def test_the_experiments_run_and_show_what_the_page_says(tmp_path: Path) -> None:
    text = (DOCS / "experiments.md").read_text()
    for whole, short in SHORTENED.items():
        assert whole in text
        text = text.replace(whole, short)
    namespace, (_, blocks, order, prefix, chunks, pause, look) = run_snippets(text, tmp_path)
    [(_, small_running, small_waste), (_, large_running, large_waste)] = blocks
    assert float(small_running) >= float(large_running)
    assert float(small_waste) < float(large_waste)
    assert [len(seconds) for seconds in namespace["finished"].values()] == [8, 8]
    assert [words[:2] for words in order] == [["first", "come"], ["shortest", "first"]]
    assert [int(words[2]) for words in prefix] == [384, 384, 128 + 384, 24 * 144]
    assert all(float(first) <= float(mean) <= float(last) for _, first, mean, last in chunks)
    assert [name for name, _ in pause] == ["False", "True"]
    assert float(pause[1][1]) < float(pause[0][1])
    assert {path.name for path in tmp_path.iterdir()} == {"pauses-False.html", "pauses-True.html"}
    assert [words[:3] for words in look] == [["0", "8", "0"], ["1", "0", "1"], ["2", "0", "1"]]


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_every_picture_is_small_and_well_formed(picture: Path) -> None:
    root = xml.etree.ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    assert root[0].tag.endswith("title"), "what it shows, for those who do not see it"
    assert picture.stat().st_size < 20_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_linked_from_the_readme_and_every_picture_is_shown_on_a_page() -> None:
    text = README.read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text, f"{page.name} is not linked"
    shown = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(page.read_text())}
    for picture in sorted({*DOCS.iterdir()} - {*PAGES}):
        assert picture in shown, f"{picture.name} is not shown"


def test_every_file_that_the_readmes_tree_names_exists() -> None:
    [tree] = re.findall(r"^```\n(nanoinfer/.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names = {path.name for path in (ROOT / "nanoinfer").rglob("*")}
    assert {*re.findall(r"\w+\.py|\w+(?=/)", tree)} - {"tests", "nanoinfer"} <= names


def test_the_readme_stays_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1300
