"""Random input of every kind: it is served, or refused with an error of the tree; no other exception, no crash."""

# ruff: noqa: PT017 (an error is one of two right ends)

import json
import math
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from nanoinfer import LLM, NanoinferError, SamplingParams, tiny_model_path
from nanoinfer.batch.batch_job import Job, Summary
from nanoinfer.batch.job_files import BatchOutput, Line
from nanoinfer.checkpoint.loader import load_model
from nanoinfer.config import EngineConfig
from nanoinfer.layers.rotary_embedding import rope_frequencies
from nanoinfer.models.native_config import read_native_folder
from tests.checkpoint.test_loader import SIZES, build, checkpoint_tensors, tiny_config

NUM_CASES = [100, pytest.param(10_000, marks=pytest.mark.slow)]

numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 10**400, 1e308, 1e-308])
texts = st.text(max_size=9) | st.sampled_from(["auto", "cpu", "float32", "stop", "\ud800", "\0", "user", "content"])
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


def fuzz(num_cases: int, check: Callable[..., None], *strategies: Any) -> None:
    """Run `check` on so many random cases: always the same ones if they are few."""
    run = given(*strategies)(check)
    few = num_cases < 1000
    settings(
        max_examples=num_cases, deadline=None, database=None, derandomize=few, suppress_health_check=list(HealthCheck)
    )(run)()


def named(names: list[str]) -> Any:
    """A dict with some of these names, or others."""
    return st.dictionaries(st.sampled_from(names) | texts, values, max_size=4)


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_engine_options(num_cases: int) -> None:
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]

    def check(model: Any, options: dict[str, Any]) -> None:
        try:
            EngineConfig.from_options(model, options)
        except NanoinferError:
            assert set(options) <= set(names)
        except TypeError as error:
            assert "LLM has no option" in str(error)

    fuzz(num_cases, check, texts, named(names))


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_sampling_parameters(num_cases: int) -> None:
    names = [field.name for field in fields(SamplingParams)]

    def check(options: dict[str, Any], generation_config: dict[str, Any]) -> None:
        for make in (
            lambda: SamplingParams(**options),
            lambda: SamplingParams.from_generation_config(generation_config),
        ):
            try:
                make()
            except NanoinferError:
                pass
            except TypeError as error:
                assert "SamplingParams has no option" in str(error)

    fuzz(num_cases, check, named(names), named([*names, "do_sample", "max_new_tokens"]))


ROPE = ["type", "rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]
ROPE += ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "rope_theta"]


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_config_json(num_cases: int, tmp_path: Path) -> None:
    others = ["rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype", "rms_norm_eps", "hidden_act"]
    rope = st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"])},
        optional={name: numbers | st.floats(0.1, 9) | values for name in ROPE[2:]},
    )

    def check(entries: dict[str, Any], rope: dict[str, Any] | None, cut: int) -> None:
        content = json.dumps({**SIZES, **({"rope_scaling": rope} if rope else {}), **entries})
        (tmp_path / "config.json").write_bytes(content.encode()[: cut or None])
        try:
            config = read_native_folder(tmp_path)
            if config.head_dim < 2**16:
                rope_frequencies(config, config.max_model_len)
        except NanoinferError:
            pass

    fuzz(num_cases, check, named([*SIZES, *others]), st.none() | rope, st.just(0) | st.integers(1, 300))


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_overrides_of_config_json(num_cases: int, tmp_path: Path) -> None:
    others = ["rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype", "hidden_act", "text_config"]
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "rope_parameters": {"rope_theta": 7.0}}))

    def check(overrides: dict[str, Any], rope: dict[str, Any]) -> None:
        try:
            config = EngineConfig(model="m", hf_overrides={**overrides, **({"rope_scaling": rope} if rope else {})})
            read_native_folder(tmp_path, overrides=config.hf_overrides)
        except NanoinferError:
            pass

    fuzz(num_cases, check, named([*SIZES, *others]), named(ROPE))


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_weights(num_cases: int, tmp_path: Path) -> None:
    valid = save(checkpoint_tensors())
    (length,) = struct.unpack("<Q", valid[:8])
    header = json.loads(valid[8 : 8 + length])
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    parts = st.fixed_dictionaries({}, optional={"dtype": values, "shape": values, "data_offsets": values})
    bytes_changed = st.dictionaries(st.integers(0, len(valid) - 1), st.integers(0, 255), max_size=5)
    model = build(tiny_config())

    def check(changes: dict[str, Any], changed: dict[int, int], cut: int, weight_map: Any) -> None:
        new = {name: {**entry, **changes.get(name, {})} for name, entry in header.items()}
        encoded = json.dumps(new).encode() if changes else valid[8 : 8 + length]
        content = bytearray(struct.pack("<Q", len(encoded)) + encoded + valid[8 + length :])
        for place, byte in changed.items():
            content[place % len(content)] = byte
        path.write_bytes(content[: cut or None])
        index.unlink(missing_ok=True)
        if weight_map is not None:
            index.write_text(json.dumps({"weight_map": weight_map}))
        try:
            load_model(model, tmp_path)
        except NanoinferError as error:
            assert str(tmp_path) in str(error)

    names = st.dictionaries(st.sampled_from([*header, "x"]), parts, max_size=2)
    cuts = st.just(0) | st.integers(1, len(valid))
    fuzz(num_cases, check, names, bytes_changed, cuts, st.none() | st.dictionaries(texts, values, max_size=3) | values)


class StrictJob(Job):
    """A job that raises the errors that are no fault of a line, which a job writes as bugs."""

    def _fail(self, line: Line, custom_id: str, error: Exception) -> None:
        if not isinstance(error, (NanoinferError, RecursionError)):
            raise error
        super()._fail(line, custom_id, error)


def almost_right(body: Any, options: dict[str, Any]) -> Any:
    """A body with some of these options; one at most is of any kind."""
    wrong = (
        st.just({}) | st.just({}) | st.just({}) | st.dictionaries(st.sampled_from(list(options)), values, max_size=1)
    )
    return st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, body, some_of(options), wrong)


def some_of(options: dict[str, Any]) -> Any:
    names = st.lists(st.sampled_from(list(options)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen}))


FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["add", "now"])},
    optional={"description": leaves, "parameters": st.just({"type": "object"}) | values},
)
TOOLS = st.lists(FUNCTION | FUNCTION.map(lambda function: {"type": "function", "function": function}), max_size=2)
CHOICE = st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "add"}}])
FORMS = [{"type": "json_object"}, {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {}}}]
SMALL = st.integers(0, 3)
COMMON_OPTIONS = {
    "n": SMALL,
    "prompt_logprobs": SMALL,
    "logprob_token_ids": st.lists(st.integers(0, 99), max_size=3),
    "stop": st.lists(texts, max_size=2),
    "temperature": st.sampled_from([0, 1]),
    "response_format": st.sampled_from(FORMS),
    "detokenize": st.booleans(),
}
COMPLETION = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["2 + 3", [5, 6], ["a", [7]]])}, optional={"echo": st.just(True)}
)
COMPLETION_OPTIONS = {"logprobs": SMALL, **COMMON_OPTIONS}
CHAT = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "2 + 3"}])},
    optional={
        "tools": TOOLS | leaves | values,
        "tool_choice": CHOICE,
        "chat_template_kwargs": st.just({"enable_thinking": False}) | leaves | values,
    },
)
CHAT_OPTIONS = {"logprobs": st.booleans(), "top_logprobs": SMALL, **COMMON_OPTIONS}


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_answers_of_a_batch(num_cases: int, tmp_path: Path) -> None:
    """Lines that are right for the most part, as a job answers them: to their ends."""
    summary = Summary(0, 0)

    with LLM(tiny_model_path(), device="cpu", num_kvcache_blocks=64) as llm:
        output = BatchOutput(tmp_path / "out")
        job = StrictJob(llm, output, SamplingParams(max_tokens=2), max_errors=math.inf, system="a")

        def check(body: dict[str, Any]) -> None:
            before = output.num_records
            if (question := job.read(Line(1, json.dumps(body).encode(), 1))) is not None:
                job.ask(question)
            while job.asked:
                job.serve(summary)
            assert output.num_records == before + 1, "answered, or an error was written"

        fuzz(num_cases, check, almost_right(CHAT, CHAT_OPTIONS) | almost_right(COMPLETION, COMPLETION_OPTIONS))
        output.close()
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(records) // 4 < sum(record["error"] is None for record in records) < len(records)


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_lines_of_a_batch(num_cases: int, tmp_path: Path) -> None:
    names = [field.name for field in fields(SamplingParams)]
    names += [
        "stream",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "tools",
        "chat_template_kwargs",
        "custom_id",
        "echo",
    ]
    message = st.fixed_dictionaries({}, optional={"role": texts, "content": values, "tool_calls": values})
    prompts = texts | st.lists(numbers, max_size=3)
    prompts |= st.lists(prompts, max_size=3) | values
    content = st.fixed_dictionaries({}, optional={"prompt": prompts, "messages": st.lists(message) | values})
    body = st.builds(lambda first, second: {**first, **second}, content, named(names))
    urls = st.sampled_from(["/v1/chat/completions", "/v1/completions"]) | values
    wrapped = st.fixed_dictionaries(
        {"url": urls, "body": body | values}, optional={"method": values, "custom_id": values}
    )
    lines = (body | wrapped | values).map(lambda line: json.dumps(line).encode()) | st.binary(max_size=50)

    with LLM(tiny_model_path(), device="cpu", num_kvcache_blocks=16) as llm:
        output = BatchOutput(tmp_path / "out")
        job = StrictJob(llm, output, SamplingParams(), max_errors=math.inf, system="a")

        def check(line: bytes, cut: int) -> None:
            before = output.num_records
            if (question := job.read(Line(1, line[: cut or None], 1))) is not None:
                job.ask(question)
            num_asked = len({id(asked) for asked in job.asked.values()})
            assert output.num_records + num_asked == before + 1, "queued, or an error was written"
            llm.engine.abort(list(job.asked))
            job.asked.clear()

        fuzz(num_cases, check, lines, st.just(0) | st.integers(1, 90))
        output.close()
    assert all(json.loads(line)["id"] for line in (tmp_path / "out").read_text().splitlines())
