"""run-batch with adapters: `model` of a line names one of --lora."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.__main__ import main
from nanoinfer.batch.batch_job import run_batch
from tests.lora.adapters import request, write_adapter

MODULES = r".*layers\.\d+\..*_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(tiny_model_path(), folder / name, seed, MODULES, std=0.2) for seed, name in enumerate("ab")
    }


def run(*words: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", *map(str, words)])
    return int(ended.value.code or 0)


def test_a_line_is_answered_with_the_adapter_that_it_names(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0, "max_tokens": 8}
    lines = [
        {"prompt": "3 + 4 =", "temperature": 0, "max_tokens": 8},
        {"prompt": "3 + 4 =", "temperature": 0, "max_tokens": 8, "model": "a"},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "model": "b"}},
        {"input": ["3 + 4 ="], "model": "b"},
        {"prompt": "3 + 4 =", "model": "c"},
        {"prompt": "3 + 4 =", "temperature": 0, "max_tokens": 8, "model": "tiny"},
    ]
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loras = [word for name, folder in folders.items() for word in ("--lora", f"{name}={folder}")]
    command = ["--model", "tiny", "--device", "cpu", "-i", source, *loras]
    assert run(*command, "--dry-run") == 3
    shown = capsys.readouterr().out
    assert "line 5: model='c' is no adapter of this job, nor 'tiny'; known are a, b" in shown
    assert "6 lines, 1 with errors" in shown
    assert run(*command, "-o", answers) == 3
    found = {one["custom_id"]: one for one in map(json.loads, answers.read_text().splitlines())}
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM("tiny", device="cpu", enable_lora=True) as llm:
        of_a, of_b = request(folders["a"], 1), request(folders["b"], 2)
        plain, adapted = llm.generate(["3 + 4 ="] * 2, greedy, use_tqdm=False, lora_request=[None, of_a])
        chatted = llm.chat(chat["messages"], greedy, use_tqdm=False, lora_request=of_b)[0]  # type: ignore[arg-type]
        embedded = llm.embed(["3 + 4 ="], use_tqdm=False, lora_request=of_b)[0].outputs.embedding
    assert plain.text != adapted.text
    bodies = {name: one["response"]["body"] for name, one in found.items() if one["response"]}
    assert [bodies[name]["choices"][0]["text"] for name in ("line-1", "line-2", "line-6")] == [
        plain.text, adapted.text, plain.text
    ]  # fmt: skip
    assert bodies["chat"]["choices"][0]["message"]["content"] == chatted.text
    assert bodies["line-4"]["data"][0]["embedding"] == pytest.approx(embedded.tolist(), abs=1e-5)
    assert [bodies[name]["model"] for name in ("line-1", "line-2", "chat", "line-4", "line-6")] == [
        "tiny", "a", "b", "b", "tiny"
    ]  # fmt: skip
    assert found["line-5"]["error"]["message"].startswith("model='c' is no adapter of this job")
    capsys.readouterr()
    assert run("--model", "tiny", "--device", "cpu", "-i", source, "-o", answers) == 2
    assert "lora" in capsys.readouterr().err


def test_what_is_no_adapter_is_refused_before_anything_is_answered(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    for loras, message in (
        (["--lora", "a"], "'a' is no adapter; give its name and folder, such as sql=adapters/sql"),
        (["--lora", f"a={folders['a']}", "--lora", f"a={folders['b']}"], "--lora has one name twice"),
        (["--lora", f"a={tmp_path}"], "adapter_config.json cannot be read"),
    ):
        assert run("--model", "tiny", "--device", "cpu", "-i", source, "-o", answers, *loras) == 2
        assert message in capsys.readouterr().err
    assert not answers.exists() or not answers.read_text()


def test_rows_are_full_where_a_job_has_more_adapters_than_slots(folders: dict[str, Path], tmp_path: Path) -> None:
    rng, source, num_rows = random.Random(0), tmp_path / "in.jsonl", list[int]()
    lines = [{"prompt": [1, 2], "model": rng.choice("abcd"), "max_tokens": rng.randint(1, 16)} for _ in range(70)]
    source.write_text("".join(json.dumps({**line, "ignore_eos": True}) + "\n" for line in lines))

    def load() -> LLM:
        llm = LLM("tiny", device="cpu", enable_lora=True, max_num_seqs=8, max_model_len=64)
        llm.on_step(lambda event: num_rows.append(event.num_decode_tokens))
        return llm

    loras = {name: str(folders["ab"[index % 2]]) for index, name in enumerate("abcd")}
    run_batch(load, source, tmp_path / "out.jsonl", loras=loras, use_tqdm=False)
    assert sum(num_rows) / len(num_rows) > 4
