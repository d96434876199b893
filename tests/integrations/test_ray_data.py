"""Ray Data with the tiny checkpoint: in a local Ray of two workers, and batches handed straight to an actor."""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoinfer import ConfigError, RequestError, SamplingParams, tiny_model_path
from tests.integrations.snippets import snippet
from tests.lora.adapters import write_adapter

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from nanoinfer.integrations import ray_data  # noqa: E402
from nanoinfer.integrations.ray_data import (  # noqa: E402
    DATA_COLUMN,
    ERROR_COLUMN,
    NO_OUTPUT,
    EngineActor,
    build_processor,
    make_table,
)

pytestmark = [
    # Ray warns of the old names of settings that it sets itself.
    pytest.mark.filterwarnings("ignore::Warning:ray.data.context"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=16)
ENGINE = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 512, "max_num_seqs": 32}
QUESTION = "What is 312 + 48?"
ANSWER = "312 + 48 = 360"


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    # Workers have the priority of all other processes, or they would get hardly any time on a machine that is busy.
    options = {"num_cpus": 4, "num_gpus": 0, "_system_config": {"worker_niceness": 0}}
    ray.init(**options, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def once(flag: Path, action: Callable[[], object]) -> Callable[[list[int], Any], Any]:
    """A logits processor that does something in the engine's own process, the first time in all processes."""

    def process(token_ids: list[int], logits: Any) -> Any:
        if not flag.exists():
            flag.touch()
            action()
        return logits

    return process


def note(folder: Path, name: str) -> Callable[[list[int], Any], Any]:
    """A logits processor that notes in a file which process it runs in, and when."""

    def process(token_ids: list[int], logits: Any) -> Any:
        with (folder / name).open("a") as file:
            file.write(f"{os.getpid()} {time.monotonic()}\n")
        return logits

    return process


def noted(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = map(str.split, (folder / name).read_text().splitlines())
    return [(int(pid), float(seconds)) for pid, seconds in lines]


def kill_workers() -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)


def test_nothing_is_lost_or_doubled_when_an_actor_is_killed(local_ray: None, tmp_path: Path) -> None:
    flag, pids = tmp_path / "killed", tmp_path / "pids"
    pids.mkdir()

    def pids_so_far() -> set[int]:
        return {pid for file in pids.iterdir() for pid, _ in noted(pids, file.name)}

    def die() -> None:
        while len(pids_so_far()) < 2:  # or the other actor might come too late to answer anything
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        processors = (
            [once(flag, die)] if row["id"] == 310 else [note(pids, str(row["id"]))] if row["id"] % 20 == 0 else None
        )
        params = SamplingParams(temperature=0, max_tokens=4, logits_processors=processors)
        return {"prompt": f"What is {row['id']} + 1?", "sampling_params": params}

    processor = build_processor(
        tiny_model_path(),
        concurrency=2,
        batch_size=50,
        max_concurrent_batches=4,
        preprocess=preprocess,
        postprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "tokens": row["num_generated_tokens"]},
        **ENGINE,
    )
    rows = processor(ray.data.range(600)).take_all()
    assert flag.exists(), "the actor with row 310 was killed"
    assert sorted(row["id"] for row in rows) == [*range(600)]
    assert all(row["prompt"] == f"What is {row['id']} + 1?" for row in rows)
    assert all(row["tokens"] in (1, 2, 3, 4) and row[ERROR_COLUMN] == "" for row in rows)
    assert len(pids_so_far()) == 3, "two, and the restarted one"


def test_a_tensor_parallel_actor_whose_worker_dies_is_started_again(local_ray: None, tmp_path: Path) -> None:
    flag = tmp_path / "killed"

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        processors = [once(flag, kill_workers)] if row["id"] == 3 else None
        params = SamplingParams(temperature=0, max_tokens=16, logits_processors=processors)
        return {"messages": ask(QUESTION), "sampling_params": params}

    processor = build_processor(
        tiny_model_path(), tensor_parallel_size=2, preprocess=preprocess, batch_size=4, **ENGINE
    )
    rows = processor(ray.data.range(8)).take_all()
    assert flag.exists(), "the process of rank 1 was killed"
    assert [row["generated_text"] for row in rows] == [ANSWER] * 8


MIXED: dict[str, dict[str, Any]] = {
    "messages": {"messages": ask(QUESTION)},
    "prompt": {"prompt": QUESTION},
    "token ids": {"tokenized_prompt": [307, 287]},
    "own parameters": {"messages": ask(QUESTION), "sampling_params": {"max_tokens": 2, "seed": None, "stop": ["x"]}},
    "a form": {"messages": ask(QUESTION), "sampling_params": {"structured_outputs": {"choice": ["yes", "no"]}}},
    "log-probabilities": {"prompt": "1 + 1", "sampling_params": {"logprobs": 1, "prompt_logprobs": 0, "max_tokens": 2}},
    "no prompt": {},
    "empty": {"prompt": ""},
    "no content": {"messages": [{"role": "user"}]},
    "wrong temperature": {"prompt": "1", "sampling_params": {"temperature": -1}},
    "unknown parameter": {"prompt": "1", "sampling_params": {"temprature": 1}},
    "several samples": {"prompt": "1", "sampling_params": {"n": 2, "temperature": 1}},
    "wrong token id": {"tokenized_prompt": [10**6]},
    "too long": {"tokenized_prompt": [5] * 5000},
}


@pytest.fixture(scope="module")
def mixed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The rows of MIXED by their names, answered by one actor and written to Parquet files; and the notes of two more.

    Each of the two rows has a batch of its own.
    """
    folder = tmp_path_factory.mktemp("mixed")

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        if row["name"] in MIXED:
            return MIXED[row["name"]]
        processors = [note(folder, row["name"])]
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logits_processors=processors)
        return {"prompt": "1", "sampling_params": params}

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        columns = ("name", "prompt_token_ids", "generated_text", "generated_tokens", "finish_reason", "logprobs")
        return {name: row[name] for name in columns} | {"first": row["prompt_logprobs"] and row["prompt_logprobs"][0]}

    processor = build_processor(
        tiny_model_path(),
        sampling_params={"temperature": 0, "max_tokens": 16},
        preprocess=preprocess,
        postprocess=postprocess,
        batch_size=1,
        **ENGINE,
    )
    dataset = ray.data.from_items([{"name": name} for name in ("long 1", *MIXED, "long 2")], override_num_blocks=16)
    return {row["name"]: row for row in processor(dataset).take_all()}, folder


def test_rows_are_conversations_texts_or_token_ids_with_parameters_of_their_own(mixed: Any) -> None:
    rows, _ = mixed
    assert rows["messages"]["generated_text"] == ANSWER
    assert rows["messages"]["finish_reason"] == "stop"
    assert 0 < len(rows["prompt"]["generated_tokens"]) <= 16
    assert rows["prompt"]["generated_text"] != ANSWER, "no chat template was applied"
    assert [*rows["token ids"]["prompt_token_ids"]] == [307, 287]
    assert rows["own parameters"]["finish_reason"] == "length"
    assert len(rows["own parameters"]["generated_tokens"]) == 2
    assert rows["a form"]["generated_text"] in ("yes", "no")


def test_log_probabilities_are_lists_of_tokens(mixed: Any) -> None:
    row = mixed[0]["log-probabilities"]
    assert row["logprobs"][0][0].keys() == {"token_id", "logprob", "rank", "decoded_token"}
    assert row["logprobs"][0][0]["token_id"] == row["generated_tokens"][0]
    assert row["first"] is None
    assert mixed[0]["messages"]["logprobs"] is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no prompt", "needs one of messages, tokenized_prompt, prompt"),
        ("empty", "prompt 0 is empty"),
        ("no content", "has no content"),
        ("wrong temperature", "temperature=-1"),
        ("unknown parameter", "sampling_params: unknown fields: temprature (did you mean 'temperature'?)"),
        ("several samples", "n=2"),
        ("wrong token id", "token id 1000000"),
        ("too long", "exceeds max_model_len"),
    ],
)
def test_a_bad_row_says_what_is_wrong_and_the_others_are_answered(mixed: Any, name: str, reason: str) -> None:
    rows, _ = mixed
    assert reason in rows[name][ERROR_COLUMN]
    assert rows["messages"][ERROR_COLUMN] == ""
    assert rows[name]["generated_text"] == "", "columns are there, so that a file of all rows has one schema"


ANSWER_OF: dict[str, Any] = {
    "no postprocess": None,
    "some columns": lambda row: {
        "name": row["name"],
        "answer": row["generated_text"],
        "tokens": row["generated_tokens"],
        "scores": row["logprobs"],
        "seconds": row["metrics"],
    },
    "fails for bad rows": lambda row: {"name": row["name"], "num_times": len(row["metrics"])},
}


@pytest.mark.parametrize("postprocess", ANSWER_OF.values(), ids=[*ANSWER_OF])
@pytest.mark.parametrize("num_blocks", [3, len(MIXED)])
def test_files_have_the_same_columns_and_types_whichever_rows_are_bad(
    local_ray: None, tmp_path: Path, postprocess: Any, num_blocks: int
) -> None:
    processor = build_processor(
        tiny_model_path(),
        sampling_params={"temperature": 0, "max_tokens": 4},
        preprocess=lambda row: MIXED[row["name"]],
        postprocess=postprocess,
        batch_size=1,
        **ENGINE,
    )
    rows = [{"name": name, "note": None if name == "messages" else "a"} for name in MIXED]
    processor(ray.data.from_items(rows, override_num_blocks=num_blocks)).write_parquet(str(tmp_path))
    files = [*tmp_path.glob("*.parquet")]
    assert len(files) == num_blocks
    schemas = [pq.read_schema(file).remove_metadata() for file in files]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert not any(pa.types.is_null(kind) for kind in schemas[0].types)
    frame = pytest.importorskip("pandas").read_parquet(tmp_path).set_index("name")
    assert {*frame.index} == {*MIXED}
    bad = {"no prompt", "empty", "no content", "wrong temperature", "unknown parameter", "several samples"}
    assert {*frame.index[frame[ERROR_COLUMN] != ""]} == bad | {"wrong token id", "too long"}
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(tmp_path / "*.parquet").height == len(MIXED)


def test_a_bad_row_has_what_it_had_where_postprocess_needs_an_answer() -> None:
    good = {"id": 1, "question": "a", "generated_text": '{"x": 5}', ERROR_COLUMN: ""}
    bad = {"id": 2, "question": "b", **NO_OUTPUT, ERROR_COLUMN: "wrong"}

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "x": json.loads(row["generated_text"])["x"]}

    rows = make_table([dict(good), dict(bad)], postprocess, True, {}).to_pylist()
    assert rows == [{"id": 1, "x": 5, ERROR_COLUMN: ""}, {"id": 2, "x": None, ERROR_COLUMN: "wrong"}]
    alone = make_table([dict(bad)], postprocess, True, {}).to_pylist()
    assert (alone[0]["id"], alone[0]["question"], alone[0][ERROR_COLUMN]) == (2, "b", "wrong")
    with pytest.raises(json.JSONDecodeError):
        make_table([{**good, "generated_text": "{"}], postprocess, True, {})


def test_values_that_arrow_does_not_know_are_kept_as_ray_keeps_them() -> None:
    rows = [{"image": np.full((2, 2), index), "any": index or "text", ERROR_COLUMN: ""} for index in range(2)]
    table = make_table(rows, None, False, {"image": pa.null()})
    assert table.column_names == ["image", "any"]
    assert [image.sum() for image in table["image"].to_numpy()] == [0, 4]
    assert isinstance(table.schema.field("any").type, ray.data.extensions.ArrowPythonObjectType)


def test_two_batches_of_an_actor_are_in_its_engine_at_once(mixed: Any) -> None:
    first, second = (noted(mixed[1], name) for name in ("long 1", "long 2"))
    assert len({pid for pid, _ in first + second}) == 1
    assert first[0][1] < second[-1][1]
    assert second[0][1] < first[-1][1]


@pytest.fixture(scope="module")
def actor() -> EngineActor:
    return EngineActor(str(tiny_model_path()), ENGINE, GREEDY, None, should_continue_on_error=False)


async def answer(actor: EngineActor, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    packed = pa.table({DATA_COLUMN: [ray.cloudpickle.dumps(row) for row in rows]})
    return [*map(ray.cloudpickle.loads, (await actor(packed))[DATA_COLUMN])]


def test_an_engine_never_drains_between_batches(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches at a time, as Ray calls an actor with max_concurrency 2: whenever one ends, the other is running."""
    num_running: list[int] = []
    step = actor.llm.queue.step

    def watched() -> None:
        num_running.append(len(actor.llm.engine.scheduler.running))
        step()

    monkeypatch.setattr(actor.llm.queue, "step", watched)

    async def run() -> None:
        two = asyncio.Semaphore(2)

        async def batch(number: int) -> None:
            async with two:
                params = {"max_tokens": 20 + 7 * number, "ignore_eos": True}
                await answer(actor, [{"prompt": f"{number} {row}", "sampling_params": params} for row in range(8)])

        await asyncio.gather(*map(batch, range(6)))

    asyncio.run(run())
    assert len(num_running) < 6 * 40, "batches share steps"
    full = [step for step, number in enumerate(num_running) if number >= 8]
    assert full == [*range(full[0], full[-1] + 1)]
    assert len(full) > len(num_running) - 20, "all but those in which the first rows come and the last ones end"


def test_an_engine_holds_two_full_running_sets_of_a_batch_that_is_larger() -> None:
    small = EngineActor(str(tiny_model_path()), {**ENGINE, "max_num_seqs": 4}, GREEDY, None, True)
    num_held: list[int] = []
    small.llm.on_step(lambda event: num_held.append(event.num_running + event.num_waiting))
    rows = asyncio.run(answer(small, [{"id": row, "prompt": f"What is {row} + 1?"} for row in range(50)]))
    assert [row["id"] for row in rows] == [*range(50)]
    assert 4 < max(num_held) <= 8


def test_rows_keep_their_order_so_that_prefixes_are_found(actor: EngineActor) -> None:
    prefix = " ".join(map(str, range(60)))
    asyncio.run(answer(actor, [{"prompt": prefix}]))
    rows = [{"id": row, "prompt": f"{prefix} {row}"} for row in range(10)]
    answered = asyncio.run(answer(actor, rows))
    assert [row["id"] for row in answered] == [*range(10)]
    assert min(row["num_cached_tokens"] for row in answered) >= 96


def test_a_row_names_the_adapter_that_answers_it(tmp_path: Path) -> None:
    write_adapter(tiny_model_path(), tmp_path / "one", 1, r".*layers\.\d+\..*_proj", std=0.2)
    (tmp_path / "broken").mkdir()
    loaded = EngineActor(str(tiny_model_path()), {**ENGINE, "enable_lora": True}, GREEDY, None, True, str(tmp_path))
    models = [None, "one", str(tiny_model_path()), "one", "broken", "../one", "two"]
    rows = asyncio.run(answer(loaded, [{"messages": ask(QUESTION), "model": model} for model in models]))
    texts, errors = [row["generated_text"] for row in rows], [row[ERROR_COLUMN] for row in rows]
    assert texts[0] == texts[2] == ANSWER
    assert texts[1] == texts[3] not in ("", ANSWER)
    assert errors[:4] == [""] * 4
    assert "adapter_config.json cannot be read" in errors[4]
    assert all("is no folder in dynamic_lora_loading_path=" in error for error in errors[5:])
    processor = build_processor(tiny_model_path(), device="cpu", dynamic_lora_loading_path=tmp_path)
    assert processor.engine["options"]["enable_lora"]
    assert processor.engine["lora_folder"] == str(tmp_path)


def test_a_bad_row_ends_the_job_where_it_is_not_to_continue(actor: EngineActor) -> None:
    with pytest.raises(RequestError, match="needs one of messages"):
        asyncio.run(answer(actor, [{"text": "1"}]))
    assert asyncio.run(answer(actor, [{"messages": ask(QUESTION)}]))[0]["generated_text"] == ANSWER


@pytest.mark.parametrize("place", ["_request", "output_columns", "step"])
def test_an_unforeseen_error_ends_every_batch_and_is_in_no_column(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    broken = EngineActor(str(tiny_model_path()), ENGINE, GREEDY, None, should_continue_on_error=True)
    owner = {"_request": broken, "output_columns": ray_data, "step": broken.llm.engine}[place]
    monkeypatch.setattr(owner, place, lambda *_: int("x"))

    async def ask_thrice() -> list[Any]:
        batches = (answer(broken, [{"prompt": "1"}]) for _ in range(3))
        return await asyncio.wait_for(asyncio.gather(*batches, return_exceptions=True), 20)

    assert [type(error) for error in asyncio.run(ask_thrice())] == [ValueError] * 3


def test_an_error_that_closes_the_engine_of_several_processes_is_the_one_that_the_batch_ends_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would repeat the batch for ever if the actor ended instead."""
    options = {**ENGINE, "tensor_parallel_size": 2, "max_num_seqs": 1}
    broken = EngineActor(str(tiny_model_path()), options, GREEDY, None, should_continue_on_error=True)
    monkeypatch.setattr(ray_data.os, "_exit", lambda _: pytest.fail("the actor ended"))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(broken.llm.engine.runner._runner, "launch", fail)

    async def ask_twice() -> list[Any]:
        rows = [{"prompt": str(row)} for row in range(6)]
        first = asyncio.gather(*(answer(broken, rows) for _ in range(2)), return_exceptions=True)
        return [*await asyncio.wait_for(first, 60), *await asyncio.gather(answer(broken, rows), return_exceptions=True)]

    assert [str(error) for error in asyncio.run(ask_twice())] == ["out of memory"] * 3


@pytest.mark.parametrize(
    "params",
    [
        {"max_completion_tokens": 3},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
        {"max_tokens": 3, "n": None},
    ],
)
def test_parameters_may_have_the_names_that_openai_gives_them(actor: EngineActor, params: dict[str, Any]) -> None:
    [row] = asyncio.run(answer(actor, [{"prompt": "1", "sampling_params": {"ignore_eos": True, **params}}]))
    assert row["num_generated_tokens"] == 3


def test_actors_draw_samples_of_their_own(actor: EngineActor) -> None:
    other = EngineActor(str(tiny_model_path()), ENGINE, GREEDY, None, should_continue_on_error=False)
    row = {"prompt": "1", "sampling_params": {"temperature": 5.0, "max_tokens": 40, "ignore_eos": True}}
    samples = [asyncio.run(answer(each, [row]))[0]["generated_tokens"] for each in (actor, other)]
    assert samples[0] != samples[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_paralel_size": 2}, TypeError, "did you mean 'tensor_parallel_size'"),
        ({"batchsize": 2}, TypeError, "did you mean 'batch_size'"),
        ({"model_source": "x"}, TypeError, "did you mean 'model'"),
        ({"concurrency": 0}, ConfigError, "concurrency=0"),
        ({"concurrency": (3, 2)}, ConfigError, r"concurrency=\(3, 2\)"),
        ({"concurrency": "2"}, ConfigError, "concurrency='2'"),
        ({"batch_size": 0}, ConfigError, "batch_size=0"),
        ({"max_concurrent_batches": 1.5}, ConfigError, "max_concurrent_batches=1.5"),
        ({"num_gpus": 1, "tensor_parallel_size": 2}, ConfigError, "use num_gpus=2"),
        ({"sampling_params": {"temperature": -1}}, RequestError, "temperature=-1"),
        ({"sampling_params": "greedy"}, RequestError, "sampling_params='greedy'"),
        ({"sampling_params": {"max_new_tokens": 5}}, RequestError, r"max_new_tokens \(did you mean 'max_tokens'\?\)"),
        ({"sampling_params": {"use_beam_search": True}}, RequestError, "use_beam_search=true is not served: nanoinfer"),
        ({"sampling_params": {"prompt": "x", "model": "y"}}, RequestError, "unknown fields: model, prompt "),
        ({"sampling_params": {"body": {}, 1: 2}}, RequestError, "unknown fields: 1, body"),
    ],
)
def test_what_is_wrong_is_said_before_ray_starts(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_processor(tiny_model_path(), **options)


def test_two_actors_on_a_gpu_share_its_memory() -> None:
    processor = build_processor(tiny_model_path(), concurrency=2, num_gpus=0.5)
    assert processor.engine["options"] == {"gpu_memory_utilization": 0.45}
    assert processor.placement["num_gpus"] == 0.5


def test_the_snippet_of_the_page_runs(local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    exec(snippet("Ray Data").replace("Qwen/Qwen3-0.6B", str(tiny_model_path())), {})
    assert "{'question': 'What is 0 + 48?', 'answer': '0 + 48 = 48'" in capsys.readouterr().out
