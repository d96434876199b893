"""The benchmark of embeddings runs on a CPU, and counts what it says that it counts."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanoinfer.__main__ import main
from nanoinfer.bench import throughput
from nanoinfer.bench.floor import embedding_flops
from nanoinfer.bench.workloads import EMBEDDED_TEXTS, NUM_WORDS, Load, as_texts, draw_workload, write_embedder
from nanoinfer.models.native_config import read_native_config

TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}


def test_a_run_reports_texts_tokens_and_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("nanoinfer.bench.floor.GIB", 2**24)
    monkeypatch.setattr(throughput, "find_spec", lambda name: None)
    load = Load(6, (3, 5), (0, 0))
    monkeypatch.setitem(EMBEDDED_TEXTS, "cpu", {"short": load})
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "embed", "--json", str(tmp_path / "figures.json")])
    assert exit_info.value.code == 0
    assert "texts and" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    num_tokens = draw_workload(0, load, NUM_WORDS).num_input_tokens
    assert figures["model"] == "tiny"
    assert figures["short"]["num_tokens"] == num_tokens
    assert figures["short"]["nanoinfer"]["texts_per_second"] == 6 / figures["short"]["nanoinfer"]["seconds"]


def test_texts_have_the_lengths_of_their_load(tmp_path: Path) -> None:
    workload = draw_workload(0, Load(100, (3, 5), (0, 0)), NUM_WORDS)
    write_embedder(tmp_path, "tiny", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    lens = [len(tokenizer(text)["input_ids"]) for text in as_texts(workload).prompts]
    assert lens == [*map(len, workload.prompts)]
    assert {*lens} == {3, 4, 5}


def test_the_floor_counts_products_and_the_pairs_that_attend() -> None:
    """A layer of BERT: q, k, v and o of 8 x 8, two products of 8 x 16; and 4 operations for each pair and value."""
    bert = read_native_config({"architectures": ["BertModel"], **TINY})
    products = 3 * 2 * (4 * 8 * 8 + 2 * 8 * 16) * 30
    assert embedding_flops(bert, [10, 20]) == products + 3 * 4 * 8 * (100 + 400)
    windowed = {"architectures": ["ModernBertModel"], **TINY, "local_attention": 4, "global_attn_every_n_layers": 3}
    modern = read_native_config(windowed)
    gated = 3 * 2 * (4 * 8 * 8 + 3 * 8 * 16) * 30
    assert embedding_flops(modern, [10, 20]) == gated + 4 * 8 * (500 + 2 * 5 * 30)
