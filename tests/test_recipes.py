"""The recipes of docs/recipes.md run as they stand there, but with the included model."""

import csv
import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoinfer import tiny_model_path
from nanoinfer.__main__ import main

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
MODEL = re.compile(r"Qwen/Qwen3(-Embedding)?-0\.6B")
RECIPES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", RECIPES[title], re.MULTILINE | re.DOTALL)


def run(title: str, **replaced: str) -> tuple[dict[str, Any], list[str]]:
    """Run the Python of a recipe; return its names, and the lines that it printed."""
    [code] = blocks(title, "python")
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as out:
        exec(MODEL.sub(str(tiny_model_path()), code), names)
    return names, out.getvalue().splitlines()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_are_ten_recipes_of_at_most_twenty_lines() -> None:
    assert len(RECIPES) == 10
    for title in RECIPES:
        code = "".join(blocks(title, "python"))
        assert "from nanoinfer import" in code or blocks(title, "console"), "it can be pasted as it stands"
        assert len([line for line in code.splitlines() if line]) <= 20, title


def test_a_table_keeps_its_bad_rows() -> None:
    pytest.importorskip("llguidance")
    run("A table from a table, with bad rows kept")
    with open("people.csv", newline="") as file:
        first, bad, last = csv.DictReader(file)
    assert [row["id"] for row in (first, bad, last)] == ["1", "2", "3"]
    assert bad["error"] == "conversation 1 is None; give a list of one message or more"
    assert (bad["name"], bad["age"]) == ("", "")
    assert all(row["error"] == "cut" or 0 <= int(row["age"]) <= 130 for row in (first, last))


def test_a_verdict_counts_if_it_is_the_same_in_both_orders() -> None:
    pytest.importorskip("llguidance")
    names, printed = run("Judge answers in pairs", **{"max_tokens=200": "max_tokens=60"})
    for pair, one, other, line in zip(names["pairs"], names["verdicts"], names["verdicts"][3:], printed, strict=False):
        agree = {one, other} == {"A", "B"}
        assert line == (pair[one == "B"] if agree else f"no verdict between {pair}")
    assert len(printed) == 3


def test_pass_at_k_is_the_share_of_draws_of_k_that_have_a_right_one() -> None:
    names, printed = run("pass@k")
    assert {0, 10} <= {*names["num_right"]}, "the included model adds numbers of three digits, and not of four"
    shares = [float(line.split()[1]) for line in printed]
    assert shares[0] == pytest.approx(sum(names["num_right"]) / 90, abs=1e-3)
    assert shares == sorted(shares)


def test_each_budget_for_thoughts_has_a_line() -> None:
    names, printed = run("What a budget for thoughts costs")
    found = [re.fullmatch(r"budget (\d+): (\d+)% right, \d+ tokens each", line) for line in printed]
    assert [line and line[1] for line in found] == ["0", "100", "1000"]
    assert found[2]
    assert float(found[2][2]) == round(100 * names["num_right"] / 9)


def test_a_tool_is_called_and_its_result_is_read() -> None:
    pytest.importorskip("llguidance")
    names, printed = run("Tools in several turns", **{"max_tokens=1000": "max_tokens=60, seed=1"})
    user, call, result, *_, last = names["messages"]
    [function] = [one["function"] for one in call["tool_calls"]]
    assert result["content"] == names["temperature"](**json.loads(function["arguments"]))
    assert (user["role"], last["role"]) == ("user", "assistant")
    assert last["content"]
    assert len(printed) == len(names["messages"])


def test_nearest_neighbours_come_in_order() -> None:
    names, printed = run("Nearest neighbours")
    assert names["similarity"].shape == (2, 4)
    found = [float(line.split()[0]) for line in printed]
    assert found[0] >= found[1]
    assert found[2] >= found[3]
    assert found[0] == pytest.approx(names["similarity"][0].max(), abs=0.01)


def test_reranked_documents_come_in_order() -> None:
    names, printed = run("Rerank with any model")
    points = [float(line.split()[0]) for line in printed]
    assert points == sorted(points, reverse=True)
    assert sorted(line.split(maxsplit=1)[1] for line in printed) == sorted(names["documents"])


def test_what_a_teacher_says_is_stored() -> None:
    run("Distill with log-probabilities")
    data = np.load("teacher.npz")
    assert len(data.files) == 2 * 4 * 4
    answer, ids, logprobs = (data[f"0-3/{name}"] for name in ("answer", "ids", "logprobs"))
    assert (ids[:, 0] == answer).all()
    assert ids.shape == logprobs.shape == (len(answer), 9)
    assert (np.diff(logprobs[:, 1:], axis=1) <= 0).all()


def test_a_probe_finds_more_in_later_layers() -> None:
    _, printed = run("Hidden states for a probe")
    assert [line.split()[1] for line in printed] == ["0", "2", "-1"]
    shares = [float(line.split()[2]) for line in printed]
    assert shares[0] < 0.65 < shares[-1]


def answer(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def test_a_file_goes_on_where_it_stopped() -> None:
    title = "A file that goes on where it stopped"
    run(title, **{"range(1000)": "range(12)"})
    [command] = blocks(title, "console")
    arguments = shlex.split(MODEL.sub(str(tiny_model_path()), command.removeprefix("$ ")))[1:]

    def answers() -> dict[str, str]:
        lines = map(json.loads, Path("answers.jsonl").read_text().splitlines())
        return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}

    answer(arguments)
    whole = answers()
    assert len(whole) == 12
    kept = Path("answers.jsonl").read_bytes().splitlines(keepends=True)
    Path("answers.jsonl").write_bytes(b"".join(kept[:5]) + kept[5][:20])
    answer(arguments)
    assert answers() == whole
