"""The benchmark's workload is nano-vllm's, its floor adds up, every load runs, and its report is consistent."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
from bench import (
    CPU_LOADS,
    LOADS,
    Load,
    Rates,
    Workload,
    compute_floor,
    count_weights,
    decode_steps,
    draw_workload,
)
from nanoinfer.checkpoint.model_config import ModelConfig

H200 = Rates(bandwidth=4.3e12, matrix_rate=790e12, method="given")
SEED_0 = draw_workload(0, num_seqs=256, load=LOADS["default"], vocab_size=151936)


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


def test_a_workload_keeps_the_lengths_of_its_load_and_its_vocabulary():
    load = Load((4,), input_len=(20, 20), output_len=(100, 110))
    workload = draw_workload(seed=3, num_seqs=4, load=load, vocab_size=50)
    assert [len(prompt) for prompt in workload.prompts] == [20] * 4
    assert all(100 <= count <= 110 for count in workload.max_tokens)
    assert max(map(max, workload.prompts)) < 50


def test_a_shared_prefix_comes_before_prompts_that_are_otherwise_the_same():
    load = Load((3,), input_len=(1, 9), output_len=(1, 9))
    plain = draw_workload(seed=3, num_seqs=3, load=load, vocab_size=50)
    shared = draw_workload(seed=3, num_seqs=3, load=replace(load, shared_prefix=5), vocab_size=50)
    assert [prompt[5:] for prompt in shared.prompts] == plain.prompts
    assert shared.max_tokens == plain.max_tokens
    assert len({tuple(prompt[:5]) for prompt in shared.prompts}) == 1
    assert load.longest == 18
    assert replace(load, shared_prefix=5).longest == 23


def test_sizes_given_take_the_place_of_a_loads_own():
    def chosen(*options: str) -> Load:
        return bench.choose_load(bench.parse_arguments([*options]), "cuda")

    assert chosen() == LOADS["default"]
    full_size = ["--num-seqs", "256", "--input-len", "1024", "--output-len", "1024", "--max-num-seqs", "512"]
    assert bench.choose_load(bench.parse_arguments(full_size), "cpu") == LOADS["default"]
    assert chosen("--load", "small").num_seqs == (1, 4, 16)
    assert chosen("--load", "small", "--num-seqs", "2").num_seqs == (2,)
    assert chosen("--input-len", "200", "--output-len", "50").input_len == (100, 200)
    assert chosen("--input-len", "200", "--output-len", "50").output_len == (50, 50)
    assert chosen("--max-num-seqs", "64", "--shared-prefix", "9") == replace(
        LOADS["default"], max_num_seqs=64, shared_prefix=9
    )


@pytest.mark.parametrize(
    ("size", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("4B", 4.02), ("8B", 8.19), ("14B", 14.77), ("32B", 32.76)]
)
def test_every_size_has_the_parameters_of_its_name(size: str, billions: float, tmp_path: Path):
    config = config_of(size, tmp_path)
    layers, lm_head = count_weights(config)
    total = layers + lm_head * (1 if config.tie_word_embeddings else 2)
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("size", "seconds", "tokens_per_second", "kv_share"),
    [("0.6B", 3.73, 35_966, 0.86), ("4B", 7.62, 17_593, 0.54), ("8B", 10.64, 12_589, 0.39)],
)
def test_the_floor_of_the_standard_workload_on_an_h200(
    size: str, seconds: float, tokens_per_second: float, kv_share: float, tmp_path: Path
):
    floor = compute_floor(config_of(size, tmp_path), SEED_0, H200)
    assert floor.seconds == pytest.approx(seconds, rel=0.01)
    assert SEED_0.num_output_tokens / floor.seconds == pytest.approx(tokens_per_second, rel=0.01)
    assert floor.decode_kv_seconds / floor.seconds == pytest.approx(kv_share, abs=0.015)


def test_decode_steps_run_each_request_to_its_end():
    workload = Workload(seed=0, prompts=[[7, 7], [7, 7, 7], [7]], max_tokens=[3, 2, 1])
    # The third is done with its prefill; the first attends to 3, then 4 tokens, the second to 4.
    assert decode_steps(workload, max_num_seqs=512) == [(2, 3 + 4), (1, 4)]


def test_beyond_max_num_seqs_requests_wait_for_room():
    workload = Workload(seed=0, prompts=[[7], [7], [7]], max_tokens=[2, 3, 3])
    assert decode_steps(workload, max_num_seqs=2) == [(2, 2 + 2), (2, 3 + 2), (1, 3)]
    assert decode_steps(workload, max_num_seqs=1) == [(1, 2), (1, 2), (1, 3), (1, 2), (1, 3)]


@pytest.fixture
def tiny_config() -> ModelConfig:
    raw = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    return ModelConfig.from_dict(raw | heads)


def test_the_floor_of_a_model_that_can_be_counted_by_hand(tiny_config: ModelConfig):
    config = tiny_config
    # q, o: 4 x 4 each; k, v: 4 x 2 each; three MLP matrices of 4 x 8; lm_head 10 x 4
    assert count_weights(config) == (16 + 16 + 8 + 8 + 96, 40)
    workload = Workload(seed=0, prompts=[[1, 2]], max_tokens=[2])
    floor = compute_floor(config, workload, Rates(bandwidth=1, matrix_rate=1, method="given"))
    # products of 2 tokens and one row of logits; 3 pairs of positions, 4 values of a query, 4 FLOPs
    assert floor.prefill_seconds == 2 * 144 * 2 + 2 * 40 + 4 * 4 * 3
    assert floor.decode_matrix_seconds == 2 * (144 + 40)
    assert floor.decode_kv_seconds == 3 * (2 + 2) * 2  # 3 tokens of 2 keys and 2 values, 2 bytes each
    assert floor.num_decode_steps == 1


def test_a_shared_prefix_is_computed_once_and_read_once_a_step(tiny_config: ModelConfig):
    rates = Rates(bandwidth=1, matrix_rate=1, method="given")
    prefix_alone = compute_floor(tiny_config, Workload(0, [[1, 2, 3]], [2]), rates)
    shared = compute_floor(tiny_config, Workload(0, [[1, 2, 3, 4], [1, 2, 3, 5]], [2, 2], shared_prefix=3), rates)
    apart = compute_floor(tiny_config, Workload(0, [[1, 2, 3, 4], [1, 2, 3, 5]], [2, 2]), rates)
    layers, lm_head = count_weights(tiny_config)
    # the prefix with one row of logits, a row more, and two tokens that attend to 4 tokens each
    alone = prefix_alone.prefill_seconds
    assert shared.prefill_seconds == alone + 2 * lm_head + 2 * (2 * layers + 4 * 4 * 4)
    # one step: 2 sequences that attend to 5 tokens, 3 of them the same; 8 bytes for each
    assert apart.decode_kv_seconds == (5 + 5) * 8
    assert shared.decode_kv_seconds == (5 + 2) * 8
    assert shared.decode_matrix_seconds == apart.decode_matrix_seconds


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
    parts = ("prefill", "decode_matrix", "decode_kv")
    for run in figures["runs"]:
        assert run["output_tokens"] == 15
        assert run["stats"]["prefill_tokens"] == run["input_tokens"] == 24
        # a request's first token comes out of its prefill
        assert run["stats"]["decode_tokens"] == 15 - 3
        assert run["stats"]["prefill_seconds"] + run["stats"]["decode_seconds"] <= run["seconds"]
        assert run["output_tokens_per_second"] == pytest.approx(15 / run["seconds"])
        assert run["floor_seconds"] == pytest.approx(sum(run["floor"][f"{part}_seconds"] for part in parts))
        assert run["share_of_floor"] == pytest.approx(run["floor_seconds"] / run["seconds"])


def test_an_engine_that_is_not_installed_is_named(tiny_size: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nanovllm", None)
    with pytest.raises(SystemExit, match="--engine nanovllm cannot be imported here"):
        bench.main(["--size", tiny_size, "--engine", "nanovllm"])


def test_lengths_beyond_the_model_are_refused(tiny_size: str):
    with pytest.raises(SystemExit, match=r"add up to 41064, and Qwen3-0\.6B takes 40960"):
        bench.main(["--size", tiny_size, "--input-len", "40000", "--output-len", "1064"])


@pytest.mark.parametrize("name", LOADS)
def test_every_load_runs_on_a_cpu(
    name: str, tiny_size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert CPU_LOADS.keys() == LOADS.keys()
    small = replace(CPU_LOADS[name], input_len=(2, 6), output_len=(2, 3))
    monkeypatch.setitem(CPU_LOADS, name, small)
    bench.main(["--size", tiny_size, "--load", name])
    printed = capsys.readouterr().out
    for num_seqs in small.num_seqs:
        assert f"Seed 0: {num_seqs} requests" in printed
        assert f"seed 0, {num_seqs} requests" in printed
    assert printed.count("reached") == len(small.num_seqs)


def test_a_shared_prefix_is_found_in_the_cache_by_all_but_the_first(
    tiny_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["--num-seqs", "3", "--input-len", "8", "--output-len", "2", "--shared-prefix", "256"]
    bench.main(["--size", tiny_size, *options, "--json", str(tmp_path / "figures.json")])
    expected = "prefix cache: 512 of 792 prompt tokens found (64.6%), 280 computed"
    assert expected in capsys.readouterr().out
    run = json.loads((tmp_path / "figures.json").read_text())["runs"][0]
    assert (run["stats"]["cached_tokens"], run["stats"]["prefill_tokens"]) == (512, 256 + 3 * 8)


def test_the_rows_of_the_engine_can_be_chosen(tiny_size: str, tmp_path: Path):
    options = ["--num-seqs", "4", "--input-len", "2", "--output-len", "3", "--max-num-seqs", "2"]
    bench.main(["--size", tiny_size, *options, "--json", str(tmp_path / "figures.json")])
    run = json.loads((tmp_path / "figures.json").read_text())["runs"][0]
    assert run["stats"]["num_prefill_steps"] == 2
    assert run["floor"]["num_decode_steps"] == run["stats"]["num_decode_steps"] == 2 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "nanovllm", "--top-k", "20"], "nano-vllm has no --top-k and --top-p"),
        (["--engine", "vllm", "--profile", "here"], "--attention-backend are options of --engine nanoinfer alone"),
        (["--engine", "vllm", "--attention-backend", "torch"], "are options of --engine nanoinfer alone"),
        (["--host-only", "--profile", "here"], "--host-only runs no model; leave out --profile"),
        (["--host-only", "--num-seqs", "3", "--engine", "vllm"], "leave out --engine, --num-seqs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        bench.main(options)
    assert message in capsys.readouterr().err
