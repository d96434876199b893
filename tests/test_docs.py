"""The documentation does what it says: its snippets run, its links lead somewhere, the README stays short."""

import doctest
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from nanoinfer import tiny_model_path
from nanoinfer.models import SUPPORTED
from tests.draw_experiments import run_snippets

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")


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
    [section] = re.findall(
        rf"^## {title}\n(.*?)(?=^## |\Z)", (DOCS / "integrations.md").read_text(), re.MULTILINE | re.DOTALL
    )
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


def contrast(color: str, background: str) -> float:
    """The ratio of WCAG 2, from 1 for equal colors to 21 for black on white."""

    def luminance(color: str) -> float:
        digits = color if len(color) == 6 else "".join(digit * 2 for digit in color)
        shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted(luminance(color) + 0.05 for color in (color, background))
    return lighter / darker


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_every_picture_can_be_seen_on_white_and_on_dark_pages(picture: Path) -> None:
    """GitHub's dark page is #0d1117. Only text on colored boxes, of class `on`, may be white."""
    text = re.sub(r"\.on \{[^}]*\}", "", picture.read_text())
    colors = {*re.findall(r"#([0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b", text)}
    assert colors
    for color in colors:
        assert min(contrast(color, "ffffff"), contrast(color, "0d1117")) > 2, color
    assert "text {" in text, "else it is black"


def test_the_page_of_models_has_every_architecture() -> None:
    page = (DOCS / "models.md").read_text()
    for name in SUPPORTED:
        of_text = name.replace("ForConditionalGeneration", "ForCausalLM")
        assert f"`{name}`" in page or f"`{of_text}`" in page, name


def test_the_page_of_kernels_has_every_operation() -> None:
    folders = {path.parent.name for path in (ROOT / "nanoinfer" / "ops").glob("*/*.py")}
    [table] = re.findall(
        r"^## Which there are$.*?(\n\|.*?)^## ", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert {*re.findall(r"`(\w+)`", table)} == folders


def test_the_page_of_installation_has_every_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    [extras] = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)\n\n", project, re.MULTILINE | re.DOTALL)
    table = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"^([\w-]+) = ", extras, re.MULTILINE)) == sorted(table)


def test_the_page_of_a_package_index_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """It is in pyproject.toml: links to files would lead nowhere there."""
    [page] = re.findall(r'^text = """\n(.*?)^"""', (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert all(target.startswith("https://") for target, _ in LINK.findall(page))
    [snippet] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(snippet, {"__name__": "__main__"})
    assert capsys.readouterr().out == f"{snippet.rpartition('  # ')[2]}"


def test_the_readmes_shell_blocks_can_be_pasted_each_by_itself() -> None:
    text = README.read_text()
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert block.startswith("python3 -m venv .venv && "), "which may have been made before"
        assert not re.search(r"^\$|<|\.\.\.$", block.replace("torch<2", ""), re.MULTILINE), (
            "nothing to remove or fill in"
        )
    assert "git clone" in text
    assert "index-url" not in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), "no line to insert"


def test_what_is_installed_comes_from_a_clone() -> None:
    for page in ALL_PAGES:
        assert "pip install nanoinfer" not in page.read_text()
        assert "pip install 'nanoinfer" not in page.read_text()


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_to_a_section_that_it_has(page: Path) -> None:
    for target, section in LINK.findall(page.read_text()):
        if not target.startswith("https://"):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not section or section in sections(path), f"{page.name} links to {target}#{section}"


def sections(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_linked_from_the_readme_and_every_picture_is_shown_on_a_page() -> None:
    text = README.read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text, f"{page.name} is not linked"
    shown = {(page.parent / target).resolve() for page in PAGES for target, _ in LINK.findall(page.read_text())}
    for picture in sorted({*DOCS.iterdir()} - {*PAGES}):
        assert picture in shown, f"{picture.name} is not shown"


def test_every_file_that_the_readmes_tree_names_exists() -> None:
    [tree] = re.findall(r"^```\n(nanoinfer/.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    package = ROOT / "nanoinfer"
    for line in tree.splitlines()[1:]:
        assert len(line) <= 100, "the rest is cut off on GitHub"
        if not line.startswith("    "):  # else it goes on with the folders of the line before
            folders = [package]
        for name in re.findall(r"[\w/]+/(?=[ :]|$)", line):
            found = [path for path in package.rglob("*") if path.is_dir() and f"{path}/".endswith(f"/{name}")]
            assert found, f"{name} in {line!r} is no folder"
            folders += found
        if path := re.match(r"  ([\w/]+)/\w+\.py", line):
            folders.append(package / path[1])
        for name in re.findall(r"[\w/]+\.py", line):
            assert any((folder / name).exists() for folder in folders), f"{name} in {line!r} is nowhere there"


def test_the_readme_stays_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1300


def test_the_core_is_as_long_as_the_readme_says() -> None:
    text = README.read_text()
    [tree] = re.findall(r"^```\n(nanoinfer/.*?)^  engine/cache_groups/", text, re.MULTILINE | re.DOTALL)
    tree, doors = tree[: tree.index("  sampling/")], tree[tree.index("  sampling/") :]
    assert [line.split()[1] for line in doors.splitlines()] == ["11", "12"]
    names = {*re.findall(r"\w+\.py", tree)} - {"llama.py", "qwen.py"}  # which are examples of their kind
    folders = [ROOT / "nanoinfer" / folder for folder in ("", "engine", "runner", "models")]
    core = [folder / name for name in names for folder in folders if (folder / name).exists()]
    assert len(core) == len(names) == 15
    [said] = re.findall(r"about\s([\d,]+)\slines", text)
    num_lines = sum(len(path.read_text().splitlines()) for path in core)
    assert 50 * round(num_lines / 50) == int(said.replace(",", ""))
    [said] = re.findall(r"some\s([\d,]+)\slines", text)
    num_lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "nanoinfer").rglob("*.py"))
    assert num_lines == pytest.approx(int(said.replace(",", "")), rel=0.05)
