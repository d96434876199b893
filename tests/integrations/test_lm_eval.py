"""lm-evaluation-harness: the metrics of its own `hf` model, for three small tasks that need no download."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import ConfigError, RequestError, SamplingParams, tiny_model_path
from tests.integrations.snippets import snippet
from tests.lora.adapters import merge, write_adapter
from tests.real.make_smollm2 import save_smollm2

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from nanoinfer.integrations.lm_eval import NanoinferLM, sampling_params

CAPITALS = ["Paris", "Rome", "Berlin", "Madrid", "Vienna", "Lisbon"]
COUNTRIES = ["France", "Italy", "Germany", "Spain", "Austria", "Portugal"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "capitals": [{"country": country, "choices": CAPITALS, "answer": i} for i, country in enumerate(COUNTRIES)],
    "texts": [
        {"text": "The sea was calm, and the old man rowed home before the sun had set."},
        {"text": "312 + 48 = 360. One plus one is two.\n\nWater boils at 100 degrees."},
        {"text": "Once upon a time there was a small library that nobody had ever read to its end. " * 4},
    ],
    "sums": [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ((1, 1), (312, 48), (20, 22), (5, 7))
    ],
}
TASKS = {
    "capitals": """
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "sums": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
filter_list: [{name: last, filter: [{function: regex, regex_pattern: "(\\\\d+)\\\\D*$"}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three tasks, of the three kinds that there are, with their rows."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        source = f"{{data_files: {{test: {rows}}}, cache_dir: {folder / 'cache'}}}"
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {source}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(head + task)
    return folder


@pytest.fixture(scope="module")
def evaluate(tasks: Path) -> Callable[..., dict[str, Any]]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def run(model: Any, names: list[str], **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = simple_evaluate(
            model, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0, **options
        )
        return found

    return run


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    save_smollm2(folder)
    return folder


@pytest.fixture(scope="module")
def tiny() -> NanoinferLM:
    return NanoinferLM(str(tiny_model_path()), device="cpu")


def hf(folder: Path, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="the harness's own model needs it")
    return get_model("hf")(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4, **options)


def metrics(found: dict[str, Any]) -> dict[str, float]:
    numbers = ((task, name, value) for task, of in found["results"].items() for name, value in of.items())
    return {f"{task} {name}": value for task, name, value in numbers if isinstance(value, float)}


def responses(found: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [response[0] for sample in samples for response in sample["resps"]]


def assert_the_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert metrics(ours).keys() >= {"capitals acc,none", "texts word_perplexity,none", "sums exact_match,last"}
    assert metrics(ours) == pytest.approx(metrics(theirs), rel=1e-5, abs=1e-4)  # perplexities may be large
    assert responses(ours, "sums") == responses(theirs, "sums")
    for (our_total, our_greedy), (total, greedy) in zip(
        responses(ours, "capitals"), responses(theirs, "capitals"), strict=True
    ):
        assert our_total == pytest.approx(total, abs=1e-4)
        assert our_greedy == greedy
    assert responses(ours, "texts") == pytest.approx(responses(theirs, "texts"), rel=1e-6, abs=1e-4)


def test_metrics_and_loglikelihoods_are_those_of_the_hf_model(tiny: NanoinferLM, evaluate: Any) -> None:
    assert_the_same(evaluate(tiny, [*TASKS]), evaluate(hf(tiny_model_path()), [*TASKS]))


@pytest.mark.real
def test_metrics_and_loglikelihoods_of_a_real_model_are_those_of_the_hf_model(smollm2: Path, evaluate: Any) -> None:
    ours = NanoinferLM(str(smollm2), device="cpu", dtype="float32")
    found = evaluate(ours, [*TASKS])
    assert found["results"]["capitals"]["acc,none"] > 0.5
    assert_the_same(found, evaluate(hf(smollm2), [*TASKS]))


def test_chat_templates_are_applied(tiny: NanoinferLM, evaluate: Any) -> None:
    options = {"apply_chat_template": True, "system_instruction": "Answer with a sum."}
    ours, theirs = (evaluate(model, ["sums"], **options) for model in (tiny, hf(tiny_model_path())))
    assert responses(ours, "sums") == responses(theirs, "sums")
    assert metrics(ours)["sums exact_match,last"] > 0.5


def ask(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


LONG = " ".join(map(str, range(60)))


@pytest.fixture(scope="module")
def short() -> NanoinferLM:
    return NanoinferLM(str(tiny_model_path()), device="cpu", max_length=32)


def test_a_long_context_loses_its_first_tokens(short: NanoinferLM) -> None:
    [(total, _)] = short.loglikelihood([ask("loglikelihood", LONG, " 60")], disable_tqdm=True)
    context, continuation = short._encode_pair(LONG, " 60")
    assert len(context) > 32
    kept = context[-(31 - len(continuation)) :]
    [score] = short.llm.score([kept], [continuation], use_tqdm=False)
    assert total == pytest.approx(score.total, abs=1e-4)  # some tokens are cached this time


def test_a_continuation_that_is_too_long_is_scored_after_the_one_token_that_is_left(short: NanoinferLM) -> None:
    [(total, _)] = short.loglikelihood([ask("loglikelihood", "1", LONG)], disable_tqdm=True)
    _, continuation = short._encode_pair("1", LONG)
    [score] = short.llm.score([continuation[-31:-30]], [continuation[-30:]], use_tqdm=False)
    assert total == pytest.approx(score.total, abs=1e-4)  # some tokens are cached this time


def test_a_long_text_is_scored_in_windows(short: NanoinferLM) -> None:
    """The hf model's windows are as long as these if its max_length is 2 less; it needs none for a completion."""
    requests = [ask("loglikelihood_rolling", LONG), ask("loglikelihood_rolling", "1 + 1 = 2")]
    theirs = hf(tiny_model_path(), max_length=30).loglikelihood_rolling(requests, disable_tqdm=True)
    assert short.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(theirs, abs=1e-3)


def test_a_long_prompt_leaves_room_for_its_answer(short: NanoinferLM) -> None:
    requests = [ask("generate_until", LONG, {"until": ["\n"], "max_gen_toks": 8})]
    theirs = hf(tiny_model_path(), max_length=32).generate_until(requests, disable_tqdm=True)
    assert short.generate_until(requests, disable_tqdm=True) == theirs
    with pytest.raises(RequestError, match="max_gen_toks=32 leaves no room in max_length=32"):
        short.generate_until([ask("generate_until", "1", {"max_gen_toks": 32})])


def test_what_is_thought_is_no_part_of_the_answer() -> None:
    thinking = NanoinferLM(str(tiny_model_path()), device="cpu", think_end_token="=", enable_thinking=True)
    prompt = thinking.apply_chat_template([{"role": "user", "content": "What is 312 + 48?"}])
    [answer] = thinking.generate_until([ask("generate_until", prompt, {"until": ["+"]})], disable_tqdm=True)
    assert answer == "360"


def test_a_thought_ends_as_the_models_family_says_and_may_have_a_budget(tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nWhat is 312 + 48?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    request = ask("generate_until", prompt, {"until": ["\n\n\n"], "thinking_token_budget": 3})
    model = NanoinferLM(str(tiny_model_path()), device="cpu", enable_thinking=True)
    [answer] = model.generate_until([request], disable_tqdm=True)
    free = model.llm.generate(prompt, SamplingParams(temperature=0, thinking_token_budget=3), use_tqdm=False)[0].text
    assert "</think>" in free
    assert answer == free.partition("</think>")[2].strip()
    shutil.copytree(tiny_model_path(), tmp_path / "other")
    path = tmp_path / "other" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<tool_call>", "<call>"))  # which tells the family
    with pytest.raises(ConfigError, match="enable_thinking=True needs think_end_token"):
        NanoinferLM(str(tmp_path / "other"), device="cpu", enable_thinking=True)


def test_generation_arguments_are_sampling_parameters(tiny: NanoinferLM) -> None:
    options = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "seed": 1, "max_new_tokens": 3}
    first, again = (tiny.generate_until([ask("generate_until", "1", options)], disable_tqdm=True) for _ in range(2))
    assert first == again
    with pytest.raises(TypeError, match="no option 'num_beams'"):
        tiny.generate_until([ask("generate_until", "1", {"num_beams": 2})])


def with_generation_config(folder: Path, **said: Any) -> Path:
    """A copy of the tiny checkpoint whose generation_config.json says this too."""
    shutil.copytree(tiny_model_path(), folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return folder


@pytest.mark.parametrize(
    ("said", "options", "changes"),
    [
        ({"repetition_penalty": 1.5}, {}, True),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.0}, False),
        ({"no_repeat_ngram_size": 2}, {}, True),
        ({}, {"no_repeat_ngram_size": 2}, True),
        ({"max_new_tokens": 3}, {"max_gen_toks": 12}, True),
        ({"min_new_tokens": 12}, {}, True),
        ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 5}, {}, True),
        ({"num_beams": 1, "suppress_tokens": None, "max_length": 9, "temperature": 0.1, "top_k": 1}, {}, False),
    ],
    ids=str,
)
def test_generation_config_counts_as_for_the_hf_model(
    tmp_path: Path, tiny: NanoinferLM, said: dict[str, Any], options: dict[str, Any], changes: bool
) -> None:
    folder = with_generation_config(tmp_path / "model", **said)
    texts = ["1, 2, 3, 4,", "<|im_start|>user\nSpell the word banana<|im_end|>\n<|im_start|>assistant\n"]
    requests = [ask("generate_until", text, {"until": ["\n"], "max_gen_toks": 16, **options}) for text in texts]
    ours = NanoinferLM(str(folder), device="cpu", num_kvcache_blocks=16)
    found = ours.generate_until(requests, disable_tqdm=True)
    ours.close()
    assert found == hf(folder, max_length=256).generate_until(requests, disable_tqdm=True)
    plain = [ask("generate_until", text, {"until": ["\n"], "max_gen_toks": 16}) for text in texts]
    assert (found != tiny.generate_until(plain, disable_tqdm=True)) == changes


def test_what_is_sampled_follows_generation_config_and_transformers_default_of_top_k() -> None:
    config = {"top_p": 0.5, "temperature": 0.1, "max_new_tokens": 99, "min_p": None}
    params = sampling_params({"do_sample": True, "temperature": 2.0, "min_p": 0.1}, 8, [], config, [1], most=7)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (2.0, 0.5, 50, 0.1, 7)


def test_what_generation_config_asks_for_in_vain_is_refused_when_something_is_generated(tmp_path: Path) -> None:
    with_generation_config(tmp_path / "model", suppress_tokens=[5])
    model = NanoinferLM(str(tmp_path / "model"), device="cpu", num_kvcache_blocks=16)
    assert model.loglikelihood([ask("loglikelihood", "1", " 2")], disable_tqdm=True)
    with pytest.raises(
        RequestError, match=r"generation_config.json has suppress_tokens=\[5\], which the hf model follo"
    ):
        model.generate_until([ask("generate_until", "1", {})], disable_tqdm=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_length": 8, "max_model_len": 8}, ConfigError, "are the same"),
        ({"truncation_side": "top"}, ConfigError, "truncation_side='top'"),
        ({"max_lenght": 8}, TypeError, "NanoinferLM has no option 'max_lenght'; did you mean 'max_length'"),
        ({"max_gen_tokens": 8}, TypeError, "did you mean 'max_gen_toks'"),
        ({"dtyp": "float32"}, TypeError, "did you mean 'dtype'"),
        ({"block_size": 16}, TypeError, "did you mean 'kvcache_block_size'"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NanoinferLM(str(tiny_model_path()), device="cpu", **options)


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]], ids=["its own device", "cpu"])
def test_the_harness_command_knows_the_model(tasks: Path, tmp_path: Path, device: list[str]) -> None:
    """The command's own device is cuda:0, which is the CPU where there is no GPU."""
    command = [sys.executable, "-m", "nanoinfer.integrations.lm_eval", "run", "--model", "nanoinfer"]
    command += ["--model_args", f"pretrained={tiny_model_path()},max_length=256", *device]
    command += ["--tasks", "sums", "--include_path", str(tasks), "--apply_chat_template"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "|sums" in result.stdout
    assert "exact_match" in result.stdout


def test_the_snippet_of_the_page_runs(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = snippet("lm-evaluation-harness").replace("Qwen/Qwen3-0.6B", str(tiny_model_path()))
    source = source.replace("gsm8k", "sums").replace("tasks=", "task_manager=manager, tasks=")
    exec(source, {"manager": TaskManager(include_path=str(tasks), include_defaults=False)})
    assert "exact_match" in capsys.readouterr().out


def test_an_adapter_answers_in_the_place_of_the_model(tasks: Path, tmp_path: Path) -> None:
    base = tiny_model_path()
    adapter = write_adapter(base, tmp_path / "adapter", 1, r".*layers\.\d+\..*_proj", std=0.2)
    merge(base, adapter, tmp_path / "merged")
    found = []
    for folder, options in ((base, {}), (base, {"lora_local_path": str(adapter)}), (tmp_path / "merged", {})):
        lm = NanoinferLM(str(folder), device="cpu", **options)
        request = Instance("loglikelihood", {}, ("What is 312 + 48?", " 360"), 0)
        until = Instance("generate_until", {}, ("What is 312 + 48?", {"until": ["!"], "max_gen_toks": 8}), 0)
        found.append((lm.loglikelihood([request])[0][0], lm.generate_until([until])))
        lm.close()
    assert found[0] != found[1]
    assert found[1][1] == found[2][1]
    assert found[1][0] == pytest.approx(found[2][0], abs=1e-3)
