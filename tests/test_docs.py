"""The documentation does what it says: its snippets run, its links lead somewhere, the README stays short."""

import doctest
import re
from pathlib import Path

import pytest

from nanoinfer import tiny_model_path

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
