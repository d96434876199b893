"""The benchmark's workload is nano-vllm's, its floor adds up, and its report is consistent."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

import bench
from nanoinfer.config import ModelConfig

H200 = bench.Rates(bandwidth=4.3e12, matrix_rate=790e12, method="given")
SEED_0 = bench.draw_workload(0, num_seqs=256, input_len=1024, output_len=1024, vocab_size=151936)


def config_of(size: str, folder: Path) -> ModelConfig:
    bench.write_config(size, folder)
    return ModelConfig.from_folder(folder)


@pytest.fixture
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> str:
    """A size so small that a CPU runs it at once, under a name that the command line knows."""
    monkeypatch.setitem(bench.SIZES, "0.6B", (64, 96, 2, 4, 2, True))
    monkeypatch.setitem(bench.COMMON_CONFIG, "vocab_size", 300)
    monkeypatch.setitem(bench.COMMON_CONFIG, "head_dim", 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return "0.6B"


def test_seed_0_is_the_workload_of_nano_vllms_benchmark():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert SEED_0.prompts == prompts
    assert SEED_0.max_tokens == [random.randint(100, 1024) for _ in range(256)]
    assert (SEED_0.num_input_tokens, SEED_0.num_output_tokens) == (142_827, 133_966)


def test_short_workloads_keep_their_maxima_and_their_vocabulary():
    workload = bench.draw_workload(seed=3, num_seqs=4, input_len=20, output_len=110, vocab_size=50)
    assert [len(prompt) for prompt in workload.prompts] == [20] * 4
    assert all(100 <= count <= 110 for count in workload.max_tokens)
    assert max(map(max, workload.prompts)) < 50


@pytest.mark.parametrize(
    ("size", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("4B", 4.02), ("8B", 8.19), ("14B", 14.77), ("32B", 32.76)]
)
def test_every_size_has_the_parameters_of_its_name(size: str, billions: float, tmp_path: Path):
    config = config_of(size, tmp_path)
    layers, lm_head = bench.count_weights(config)
    total = layers + lm_head * (1 if config.tie_word_embeddings else 2)
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("size", "seconds", "tokens_per_second", "kv_share"),
    [("0.6B", 3.73, 35_966, 0.86), ("4B", 7.62, 17_593, 0.54), ("8B", 10.64, 12_589, 0.39)],
)
def test_the_floor_of_the_standard_workload_on_an_h200(
    size: str, seconds: float, tokens_per_second: float, kv_share: float, tmp_path: Path
):
    floor = bench.compute_floor(config_of(size, tmp_path), SEED_0, H200)
    assert floor.seconds == pytest.approx(seconds, rel=0.01)
    assert SEED_0.num_output_tokens / floor.seconds == pytest.approx(tokens_per_second, rel=0.01)
    assert floor.decode_kv_seconds / floor.seconds == pytest.approx(kv_share, abs=0.015)


def test_decode_steps_run_each_request_to_its_end():
    workload = bench.Workload(seed=0, prompts=[[7, 7], [7, 7, 7], [7]], max_tokens=[3, 2, 1])
    # The third is done with its prefill; the first attends to 3, then 4 tokens, the second to 4.
    assert bench.decode_steps(workload, max_num_seqs=512) == [(2, 3 + 4), (1, 4)]


def test_beyond_max_num_seqs_requests_wait_for_room():
    workload = bench.Workload(seed=0, prompts=[[7], [7], [7]], max_tokens=[2, 3, 3])
    assert bench.decode_steps(workload, max_num_seqs=2) == [(2, 2 + 2), (2, 3 + 2), (1, 3)]
    assert bench.decode_steps(workload, max_num_seqs=1) == [(1, 2), (1, 2), (1, 3), (1, 2), (1, 3)]


def test_the_floor_of_a_model_that_can_be_counted_by_hand(tmp_path: Path):
    raw = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    config = ModelConfig.from_dict(raw | heads)
    # q, o: 4 x 4 each; k, v: 4 x 2 each; three MLP matrices of 4 x 8; lm_head 10 x 4
    assert bench.count_weights(config) == (16 + 16 + 8 + 8 + 96, 40)
    workload = bench.Workload(seed=0, prompts=[[1, 2]], max_tokens=[2])
    floor = bench.compute_floor(config, workload, bench.Rates(bandwidth=1, matrix_rate=1, method="given"))
    # products of 2 tokens and one row of logits; 3 pairs of positions, 4 values of a query, 4 FLOPs
    assert floor.prefill_seconds == 2 * 144 * 2 + 2 * 40 + 4 * 4 * 3
    assert floor.decode_matrix_seconds == 2 * (144 + 40)
    assert floor.decode_kv_seconds == 3 * (2 + 2) * 2  # 3 tokens of 2 keys and 2 values, 2 bytes each


def test_a_run_reports_what_it_did(tiny_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--size", tiny_size, "--num-seqs", "3", "--input-len", "8", "--output-len", "5", "--runs", "2"]
    bench.main([*options, "--json", str(tmp_path / "figures.json")])
    printed = capsys.readouterr().out
    for expected in ("loaded in", "Seed 0: 3 requests, 24 tokens in, 15 out", "Seed 1", "prefill", "decode", "reached"):
        assert expected in printed

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["command"] == ["bench.py", *options, "--json", str(tmp_path / "figures.json")]
    assert figures["options"]["num_seqs"] == 3
    assert figures["hardware"]["cpu_cores"] >= 1
    assert {"python", "torch"} <= set(figures["versions"])
    assert figures["load_seconds"] > 0
    assert figures["rates"]["bandwidth"] > 1e8
    assert [run["seed"] for run in figures["runs"]] == [0, 1]
    for run in figures["runs"]:
        assert run["output_tokens"] == 15
        assert run["stats"]["prefill_tokens"] == run["input_tokens"] == 24
        # a request's first token comes out of its prefill
        assert run["stats"]["decode_tokens"] == 15 - 3
        assert run["stats"]["prefill_seconds"] + run["stats"]["decode_seconds"] <= run["seconds"]
        assert run["output_tokens_per_second"] == pytest.approx(15 / run["seconds"])
        assert run["floor_seconds"] == pytest.approx(sum(run["floor"].values()))
        assert run["share_of_floor"] == pytest.approx(run["floor_seconds"] / run["seconds"])


def test_an_engine_that_is_not_installed_is_named(tiny_size: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nanovllm", None)
    with pytest.raises(SystemExit, match="--engine nanovllm cannot be imported here"):
        bench.main(["--size", tiny_size, "--engine", "nanovllm"])


def test_lengths_beyond_the_model_are_refused(tiny_size: str):
    with pytest.raises(SystemExit, match=r"add up to 41064, and Qwen3-0\.6B takes 40960"):
        bench.main(["--size", tiny_size, "--input-len", "40000", "--output-len", "1064"])
