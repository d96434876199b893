"""`nanoinfer bench adapters` times loads without enable_lora, with it and no adapter, and with several."""

import json
from pathlib import Path

import pytest

from nanoinfer.__main__ import main
from nanoinfer.bench import adapters
from nanoinfer.bench.workloads import Load


def test_each_load_is_timed_without_and_with_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapters, "find_device", lambda: "cpu")
    monkeypatch.setattr(adapters, "choose_loads", lambda *_: [Load(4, (5, 9), (3, 3), max_num_seqs=4)])
    monkeypatch.setattr(adapters, "LOADS", ("short",))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "adapters", "--adapters", "2", "1", "--rank", "4", "--json", str(tmp_path / "figures.json")])
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    [load] = figures["loads"]
    assert all(load[name] > 0 for name in ("without", "unused", "1", "2"))
    assert len(figures["add"]) == 2
    shown = capsys.readouterr().out
    assert "| load | requests | without | enabled, unused | 1 adapters | 2 adapters |" in shown
    assert "| short | 4 |" in shown
