"""`nanoinfer bench rewriting` has an engine answer made-up texts, with proposals and without."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.__main__ import main
from nanoinfer.bench import rewriting
from nanoinfer.bench.workloads import FIELDS

NAMES = [*rewriting.TEXTS, "JSON"]
FORM: dict[str, Any] = {"type": "object", "properties": {f"field_{index}": FIELDS[index] for index in range(3)}}
FORM |= {"required": [*FORM["properties"]], "additionalProperties": False}


def test_an_engine_says_what_it_is_told_to_with_proposals_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run compares what was answered with the texts."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(rewriting, "find_device", lambda: "cpu")
    monkeypatch.setitem(rewriting.SIZES, "cpu", (40, 24))
    monkeypatch.setitem(rewriting.ROWS, "cpu", dict.fromkeys(NAMES, (2,)))
    monkeypatch.setattr(rewriting, "JSON", {"json": FORM})
    monkeypatch.setattr(rewriting, "WARM_UP", 2)
    monkeypatch.setitem(rewriting.TAILS, "cpu", (3, 1, 90))
    monkeypatch.setattr(rewriting, "NUM_RUNS", 1)
    monkeypatch.setattr("nanoinfer.speculation.controller.MIN_GAIN", 0.0)  # whatever steps cost here
    with pytest.raises(SystemExit) as ended:
        main(["bench", "rewriting", "--json", str(tmp_path / "figures.json")])
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [one["text"] for one in figures["texts"]] == [*NAMES, "random, the last ones rewriting"]
    assert figures["texts"][1]["num_accepted_tokens"] > 0
    for one in figures["texts"]:
        for speeds in (one, one["last_quarter"]):
            assert speeds["with"] > 0
            assert speeds["without"] > 0
    assert [one["tokens_a_step"] > 1 for one in figures["texts"]] == [True, True, False, True, True]
    assert "| every fifth token new | 2 |" in capsys.readouterr().out
