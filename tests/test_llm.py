"""The facade: what a user calls, what comes back, and what happens to calls that make no sense."""

import asyncio
import copy
import gc
import inspect
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import (
    LLM,
    ConfigError,
    EngineClosedError,
    ModelError,
    RequestError,
    RequestOutput,
    SamplingParams,
    tiny_model_path,
)
from nanoinfer.engine import request
from nanoinfer.engine.interrupts import postponed_interrupt

Checkpoint = Callable[..., Path]
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 64, "max_model_len": 256}
    with LLM(random_checkpoint(), device="cpu", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


def finish(llm: LLM) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while not llm.is_finished():
        outputs += llm.step()
    return outputs


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4], list(np.array([5, 6]))]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 1, 4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert {type(token_id) for output in outputs for token_id in output.prompt_token_ids} == {int}
    assert [len(output.token_ids) for output in outputs] == [9, 1, 4]
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert 1 <= len(llm.generate(prompts[2], use_tqdm=False)[0].token_ids) <= 64, "by default"
    assert llm.generate([], SHORT, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty"),
        ([1, 512], "prompt 1 has token id 512, outside the vocabulary; ids are 0 to 511"),
        ([-1], "prompt 1 has token id -1, outside the vocabulary"),
        ([1, "a"], "prompt 1 has 'a' among its token ids"),
        ([1, True], "prompt 1 has True among its token ids"),
        (7, "prompt 1 is a int; give a string or a list of token ids"),
        (list(range(256)), "prompt 1 has 256 tokens, and with one more exceeds max_model_len=256"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_queued(llm: LLM, prompt: list, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2], prompt], SHORT, use_tqdm=False)
    assert llm.is_finished()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_params": [SHORT]}, "1 sampling_params for 2 prompts"),
        ({"sampling_params": [SHORT, None]}, "give a SamplingParams for all prompts, or a list with one for each"),
        ({"sampling_params": {"max_tokens": 3}}, "give a SamplingParams for all prompts, or a list with one for each"),
        ({"sampling_params": "greedy"}, "give a SamplingParams for all prompts, or a list with one for each"),
        ({"on_finish": 3}, "on_finish=3 cannot be called; give a function"),
        ({"priority": [1]}, "1 priorities for 2 prompts; give one for each"),
        ({"priority": 3}, "priority=3 must be a list of whole numbers"),
        ({"priority": [1, 0.5]}, r"priority=\[1, 0.5\] must be a list of whole numbers"),
    ],
    ids=str,
)
def test_lists_of_other_lengths_or_kinds_are_refused_before_anything_is_queued(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], [2]], use_tqdm=False, **options)
    assert llm.is_finished()


def test_requests_added_before_a_generate_are_not_lost_in_it(llm: LLM) -> None:
    added = [llm.add_request([1, 2, 3], SHORT), llm.add_request([4, 5], SHORT)]
    [output] = llm.generate([[4, 5, 6]], SHORT, use_tqdm=False)
    assert output.request_id not in added
    assert not llm.is_finished()
    assert [output.request_id for output in finish(llm)] == added
    assert llm.step() == []


@pytest.mark.parametrize("method", ["launch", "wait"])
@pytest.mark.parametrize("failing_step", [0, 1, 3])
def test_a_failure_inside_generate_leaves_no_request_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, failing_step: int, method: str
) -> None:
    expected = [output.token_ids for output in llm.generate([[1] * 40, [2] * 40], SHORT, use_tqdm=False)]
    llm.reset_prefix_cache()
    runner = llm.engine.runner
    assert runner is not None
    original, count = getattr(runner, method), 0

    def fail_once(argument):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count == failing_step + 1:
            raise KeyboardInterrupt
        return original(argument)

    monkeypatch.setattr(runner, method, fail_once)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1] * 40, [2] * 40], SHORT, use_tqdm=False)
    assert llm.is_finished()
    assert llm.engine.block_manager.num_used_blocks == 0
    again = llm.generate([[1] * 40, [2] * 40], SHORT, use_tqdm=False)
    assert [output.token_ids for output in again] == expected


def test_a_request_that_finished_while_another_was_aborted_is_not_lost(llm: LLM) -> None:
    kept = llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    dropped = llm.add_request([4, 5, 6], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert llm.step() == llm.step() == []  # the last token of the first request is in flight
    llm.engine.abort([dropped])
    assert not llm.is_finished()
    assert [output.request_id for output in llm.step()] == [kept]


def test_outputs_of_a_step_are_kept_when_the_text_of_one_cannot_be_made(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [llm.add_request([1, 2, 3], SHORT), llm.add_request([4, 5, 6], SHORT)]
    failures = [KeyboardInterrupt]

    def fail_once(*args: Any, **fields: Any) -> RequestOutput:
        if failures:
            raise failures.pop()
        return RequestOutput(*args, **fields)

    monkeypatch.setattr(request, "RequestOutput", fail_once)
    for _ in range(4):
        llm.step()
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert [output.request_id for output in finish(llm)] == ids


def test_a_request_whose_logits_are_nan_ends_in_an_error_and_harms_no_other(
    random_checkpoint: Checkpoint, checkpoint_with_nan: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Token 7 has an embedding of NaN: prompts with it are lost, before, beside and after the others."""
    good, bad = [[11] * 20, [12] * 40, [13] * 3], [[7] * 20, [12] * 35 + [7]]
    options = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 24, "max_model_len": 256}
    with LLM(random_checkpoint(), **options) as llm:
        expected = [output.token_ids for output in llm.generate(good, SHORT, use_tqdm=False)]
    with LLM(checkpoint_with_nan, **options) as llm:
        for _ in range(3):
            outputs = llm.generate([bad[0], *good, bad[1]], SHORT, use_tqdm=False)
            assert [output.finish_reason for output in outputs] == ["error", *["length"] * 3, "error"]
            assert [output.token_ids for output in outputs] == [[], *expected, []]
            assert f"request {outputs[0].request_id} ends in an error: the logits are NaN or infinite" in caplog.text
        assert llm.engine.block_manager.num_used_blocks == 0


def test_close_twice_is_fine_and_later_calls_say_so(random_checkpoint: Checkpoint) -> None:
    llm = LLM(random_checkpoint(), device="cpu")
    llm.close()
    llm.exit()
    for call in (lambda: llm.generate([1]), lambda: llm.add_request([1]), llm.step, llm.reset_prefix_cache):
        with pytest.raises(EngineClosedError, match="make a new LLM"):
            call()


def test_calls_from_several_threads_get_the_answers_of_calls_one_after_another(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 9, 17)]
    prompts = [[[index + 1] * 5, [index + 2] * 7, [index + 3] * 20] for index in range(4)]
    alone = [[output.token_ids for output in llm.generate(batch, params, use_tqdm=False)] for batch in prompts]
    wrong: list[object] = []

    def call(index: int) -> None:
        try:
            for _ in range(8):
                outputs = llm.generate(prompts[index], params, use_tqdm=False)
                if [output.token_ids for output in outputs] != alone[index]:
                    wrong.append(index)
                streamed = list(llm.stream(prompts[index][0], params[0]))
                if [token_id for chunk in streamed for token_id in chunk.token_ids] != alone[index][0]:
                    wrong.append(index)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many changes of thread as there can be
    try:
        threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    assert llm.is_finished()
    assert llm.engine.block_manager.num_used_blocks == 0


def test_another_thread_never_finds_the_engine_finished_before_the_last_output_is_there(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, found = llm.engine.scheduler.update, []

    def look_after_update(*arguments: Any) -> Any:
        finished = update(*arguments)
        found.append(llm.is_finished())  # as another thread may, before the step has kept what finished
        return finished

    monkeypatch.setattr(llm.engine.scheduler, "update", look_after_update)
    llm.add_request([1, 2, 3], SHORT)
    assert len(finish(llm)) == 1
    assert set(found) == {False}


def test_ctrl_c_while_a_thread_takes_its_turn_leaves_the_turn_to_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """The queue's lock, at whose end of `acquire` Ctrl-C comes: it is held, and no `try` has begun."""

        def acquire(self, timeout: float) -> bool:
            is_held = lock.acquire(timeout=timeout)
            signal.raise_signal(signal.SIGINT)
            return is_held

        def release(self) -> None:
            lock.release()

    lock = llm.queue.lock
    llm.add_request([1, 2, 3], SHORT)
    monkeypatch.setattr(llm.queue, "lock", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        llm.queue.step()
    monkeypatch.setattr(llm.queue, "lock", lock)
    others: list[bool] = []
    thread = threading.Thread(target=lambda: others.append(lock.acquire(timeout=10) and lock.release() is None))
    thread.start()
    thread.join(20)
    assert others == [True]
    assert len(finish(llm)) == 1


def test_a_postponed_ctrl_c_keeps_no_frame_and_so_no_view_of_an_array_that_is_to_grow() -> None:
    tokens = array("i", [1, 2])

    def look() -> int:
        view = memoryview(tokens)
        signal.raise_signal(signal.SIGINT)
        return len(view)

    def look_and_append() -> None:
        with postponed_interrupt():
            tokens.append(look())

    with pytest.raises(KeyboardInterrupt):
        look_and_append()
    assert tokens.tolist() == [1, 2, 2]


def test_a_construction_that_fails_leaves_no_weights_no_open_file_and_no_process(
    random_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    shutil.copytree(random_checkpoint(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    last = max(weights)
    save_file({name: weight for name, weight in weights.items() if name != last}, tmp_path / "model.safetensors")
    gc.collect()
    files_before, modules_before = os.listdir("/proc/self/fd"), num_modules()
    for _ in range(3):
        with pytest.raises(ModelError, match="lacks weights for"):
            LLM(tmp_path, device="cpu")
        with pytest.raises(ConfigError, match="max_model_len=999999 is above"):
            LLM(tmp_path, device="cpu", max_model_len=999999)
    gc.collect()
    assert num_modules() == modules_before
    assert len(os.listdir("/proc/self/fd")) == len(files_before)
    assert multiprocessing.active_children() == []


def num_modules() -> int:
    """Models and their parts that are alive."""
    return sum(issubclass(type(item), torch.nn.Module) for item in gc.get_objects())


# --- callbacks, priorities, text and ids, metrics ---


def test_on_finish_is_called_for_each_request_as_it_finishes(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 2, 5)]
    seen: list[RequestOutput] = []
    running = []

    def note(output: RequestOutput) -> None:
        seen.append(output)
        running.append(len(llm.engine.scheduler.running))

    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False, on_finish=note)
    assert [len(output.token_ids) for output in seen] == [2, 5, 9]
    assert running == [2, 1, 0], "the others were still under way"
    assert sorted(seen, key=lambda output: output.request_id) == outputs


def test_chat_refuses_an_on_finish_that_cannot_be_called_before_it_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="on_finish=3 cannot be called; give a function"):
        llm.chat([{"role": "user", "content": "hi"}], on_finish=3)  # type: ignore[arg-type]


def test_an_error_in_on_finish_ends_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    def fail(output: RequestOutput) -> None:
        raise KeyError("the callback's own")

    with pytest.raises(KeyError, match="own"):
        llm.generate([[1], [2]], [SHORT, SamplingParams(max_tokens=90, ignore_eos=True)], False, on_finish=fail)
    assert llm.is_finished()
    assert llm.engine.block_manager.num_used_blocks == 0


def test_on_finish_may_call_generate_and_abort(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    nested: list[RequestOutput] = []

    def call(output: RequestOutput) -> None:
        if not nested:
            nested.extend(llm.generate([[9], [8]], SHORT, use_tqdm=False))
            llm.abort(output.request_id + 1)

    outputs = llm.generate([[1], [2]], [SHORT, long], use_tqdm=False, on_finish=call)
    assert [output.finish_reason for output in outputs] == ["length", "abort"]
    assert [output.finish_reason for output in nested] == ["length"] * 2
    assert llm.is_finished()


def test_one_after_another_by_priority_and_each_says_how_long_it_waited(random_checkpoint: Checkpoint) -> None:
    params, seen = [SHORT, SHORT, SHORT, SamplingParams(max_tokens=1, ignore_eos=True)], []
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=1) as llm:
        llm.generate([[1], [2], [3], [4]], params, False, priority=[0, 5, -1, 5], on_finish=seen.append)
        column = np.array([0, 5, -1, 5])
        llm.generate([[1], [2], [3], [4]], params, False, priority=column, on_finish=seen.append)
    assert [output.prompt_token_ids for output in seen] == [[2], [4], [1], [3]] * 2
    first, second, *_ = [output.metrics for output in seen]
    assert first.time_per_token > 0
    assert 0 <= first.queue_time < first.time_to_first_token < second.queue_time
    assert second.time_per_token is None, "one token has no pace"


def test_encode_and_decode_are_the_tokenizers(llm: LLM, tiny: LLM) -> None:
    for call in (lambda: llm.encode("a"), lambda: llm.decode([1])):
        with pytest.raises(RequestError, match="has no tokenizer"):
            call()
    ids = tiny.encode("12 + 3<|im_end|>")
    assert ids == tiny.tokenizer("12 + 3<|im_end|>")["input_ids"]
    assert tiny.decode(ids) == tiny.decode(iter(ids)) == "12 + 3"
    assert tiny.decode(ids[0]) == tiny.decode(ids[:1])
    assert tiny.decode(ids, skip_special_tokens=False) == "12 + 3<|im_end|>"
    assert tiny.default_sampling_params.temperature == 0.6, "as its generation_config.json has it"


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        *(("decode", ids, "is no token id") for ids in ([-1], [2**40], [5000], ["a"], [True], None, "12")),
        ("encode", "\ud800", "a lone surrogate"),
        ("encode", 3, "3 is a int; give a string"),
    ],
)
def test_encode_and_decode_name_what_they_cannot_take(tiny: LLM, method: str, wrong: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        getattr(tiny, method)(wrong)


def test_the_metrics_of_an_engine_add_up(random_checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16, num_kvcache_blocks=128) as llm:
        llm.generate([[1] * 40, [2] * 20], SHORT, use_tqdm=True)
        llm.generate([[1] * 40], SHORT, use_tqdm=False)
        metrics = llm.get_metrics()
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (100, 12)
    assert metrics.prefix_hit_rate == 0.32, "two blocks of 16 tokens"
    assert (metrics.num_preemptions, metrics.num_used_blocks, metrics.num_blocks) == (0, 0, 128)
    assert (metrics.num_prefill_steps, metrics.num_decode_steps) == (2, 6)
    assert metrics.prefill_seconds > 0
    assert metrics.decode_seconds > 0
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("2/2", "prefill", "decode")), "the progress bar"


def test_a_notebook_shows_a_table_of_the_llm_and_one_of_its_outputs(tiny: LLM) -> None:
    outputs = tiny.generate(["<b>", [1, 2]], SHORT, use_tqdm=False)
    assert outputs == [*outputs]
    assert "&lt;b&gt;" in outputs._repr_html_()  # type: ignore[attr-defined]
    shown = tiny._repr_html_()
    assert all(part in shown for part in ("cpu, float32", "Qwen3ForCausalLM", "num_generated_tokens"))


def test_scores_and_embeddings_are_shown_as_tables_and_read_with_a_bar_of_their_own(
    tiny: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = tiny.score("<b>", ["1", "2"])
    embeddings = tiny.embed(["<b>", [1, 2]])
    refused = tiny.generate([""], on_error="return", use_tqdm=False)
    bars = capsys.readouterr().err
    assert re.findall(r"^\w+(?=: 2/2)", bars, re.MULTILINE) == ["Scoring", "Reading"]
    assert ">is_greedy<" in scores._repr_html_()
    assert scores._repr_html_().count("<tr>") == 3
    assert "&lt;b&gt;" in embeddings[:1]._repr_html_()
    assert "EmbeddingOutput(embedding=[" in embeddings._repr_html_()
    assert "[]" not in refused._repr_html_()


def test_a_closed_llm_is_shown_as_closed(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), device="cpu") as llm:
        assert "closed" not in repr(llm)
    assert repr(llm).endswith(", closed)")
    assert ", closed)" in llm._repr_html_()


def test_an_llm_is_not_copied_to_another_process_and_datasets_tell_one_from_another(
    llm: LLM, random_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    for copied in (llm, llm.generate):
        with pytest.raises(TypeError, match=r"an LLM cannot be pickled or copied, .* leave num_proc out of map"):
            pickle.dumps(copied)
    with pytest.raises(TypeError, match="an LLM cannot be pickled"):
        copy.copy(llm)
    assert datasets_hash(llm) == datasets_hash(llm)
    folder = shutil.copytree(random_checkpoint(), tmp_path / "model")
    (folder / "link").symlink_to("nowhere")  # no file of the model
    with LLM(folder, device="cpu") as other:
        before = datasets_hash(other)
        assert before != datasets_hash(llm), "it has other options"
        other.update_weights({})
        assert datasets_hash(other) != before, "its weights may be others"


def datasets_hash(llm: LLM) -> bytes:
    """What the pickler of `datasets` makes a fingerprint of: a subclass of Python's own."""
    written = io.BytesIO()
    type("Pickler", (pickle._Pickler,), {"__module__": "datasets.utils._dill"})(written).dump(llm)
    return written.getvalue()


def test_chats_have_hidden_states_of_their_prompts(tiny: LLM) -> None:
    chat = [{"role": "user", "content": "What is 312 + 48?"}]
    seen: list[tuple[int, int]] = []
    [output] = tiny.chat(chat, SHORT, use_tqdm=False, hidden_states=[0, -1])
    [same] = tiny.generate([output.prompt_token_ids], SHORT, use_tqdm=False, hidden_states=[0, -1])
    assert output.hidden_states is not None
    assert same.hidden_states is not None
    assert [*output.hidden_states] == [0, -1]
    assert torch.allclose(output.hidden_states[-1], same.hidden_states[-1], atol=1e-5)
    [last] = tiny.chat(chat, SHORT, use_tqdm=False, hidden_states=[-1], hidden_state_positions="last")
    assert last.hidden_states is not None
    assert torch.allclose(last.hidden_states[-1], same.hidden_states[-1][-1:], atol=1e-5)
    tiny.chat(
        chat, SHORT, False, hidden_states=[2], on_hidden_states=lambda index, layer, *_: seen.append((index, layer))
    )
    assert seen == [(0, 2)]


@pytest.mark.parametrize(
    ("call", "options", "hint"),
    [
        ("score", {"on_eror": "return"}, "score has no option 'on_eror'; did you mean 'on_error'?"),
        ("score", {"data_1": "a"}, "score has no option 'data_1'; vLLM's score ranks pairs of texts, which classify"),
        ("stream", {"sampling_param": SHORT}, "stream has no option 'sampling_param'; did you mean 'sampling_params'?"),
        ("astream", {"sampling_param": SHORT}, "astream has no option 'sampling_param'; did you mean"),
        ("embed", {"promptname": "q"}, "embed has no option 'promptname'; did you mean 'prompt_name'?"),
        ("embed", {"truncate_prompt_tokens": 3}, "did you mean 'tokenization_kwargs'?"),
        (
            "classify",
            {"lora_request": 1},
            "classify has no option 'lora_request'; use the base model with enable_lora=True, and name",
        ),
        ("reward", {"use_tqmd": True}, "reward has no option 'use_tqmd'; did you mean 'use_tqdm'?"),
        ("aembed", {"prompt_nam": "q"}, "aembed has no option 'prompt_nam'; did you mean 'prompt_name'?"),
        ("agenerate", {"guided_json": None}, None),
        ("agenerate", {"guided_json": "a"}, "agenerate has no option 'guided_json'; did you mean 'structured_outputs="),
        ("sleep", {"levle": 2}, "sleep has no option 'levle'; did you mean 'level'?"),
        ("wake_up", {"tag": ["weights"]}, "wake_up has no option 'tag'; did you mean 'tags'?"),
        ("abort", {"request_id": 3}, "abort has no option 'request_id'; did you mean 'request_ids'?"),
        ("add_request", {"prioritty": 3}, "add_request has no option 'prioritty'; did you mean 'priority'?"),
        ("decode", {"skip_special_token": 3}, "decode has no option 'skip_special_token'; did you mean"),
    ],
)
def test_a_misspelt_option_of_any_call_is_refused_with_the_right_one(
    tiny: LLM, call: str, options: dict[str, Any], hint: str | None
) -> None:
    given = () if call in ("sleep", "wake_up", "abort") else ([1, 2],)

    async def ask() -> None:
        await getattr(tiny, call)(*given, **options)

    with pytest.raises(TypeError, match=re.escape(hint)) if hint else nullcontext():
        if inspect.iscoroutinefunction(getattr(tiny, call)):
            asyncio.run(ask())
        else:
            getattr(tiny, call)(*given, **options)


def test_prompts_as_vllms_users_write_them(llm: LLM) -> None:
    wanted = [output.token_ids for output in llm.generate([[1, 2], [3]], SHORT, use_tqdm=False)]
    given = [{"prompt_token_ids": [1, 2]}, {"prompt": [3]}]
    outputs = llm.generate(given, SHORT, use_tqdm=False)
    assert [output.token_ids for output in outputs] == wanted
    assert all(output.finished for output in outputs)
    assert llm.generate(given[0], SHORT, use_tqdm=False)[0].token_ids == wanted[0]
    llm.add_request(given[0], SHORT)
    while not (finished := llm.step()):
        pass
    assert finished[0].token_ids == wanted[0]
    for wrong in ({"role": "user", "content": "a"}, {"text": "a"}, {"prompt_token_ids": "a"}, {}):
        with pytest.raises(RequestError, match=r"prompt 0 is a dict; .* token ids, or \{'prompt': either\}"):
            llm.generate([wrong], SHORT, use_tqdm=False)


def test_what_vllms_generate_and_chat_take_is_accepted_where_it_asks_for_nothing(llm: LLM, tiny: LLM) -> None:
    [output] = llm.generate([[1, 2]], SHORT, use_tqdm=False, lora_request=None, prompt_token_ids=None)  # type: ignore[call-arg]
    assert len(output.token_ids) == 4
    question = [{"role": "user", "content": "What is 312 + 48?"}]
    [answer] = tiny.chat(question, SamplingParams(temperature=0), False, chat_template_content_format="auto")  # type: ignore[call-arg]
    assert answer.text == "312 + 48 = 360"
    for call, options, hint in (
        (
            llm.generate,
            {"prompt_token_ids": [[1]]},
            "generate has no option 'prompt_token_ids'; did you mean 'prompts, ",
        ),
        (tiny.chat, {"guided_json": {"a": 1}}, "chat has no option 'guided_json'; did you mean 'structured_outputs="),
        (
            tiny.chat,
            {"lora_modules": 1},
            "chat has no option 'lora_modules'; use the base model with enable_lora=True, and name",
        ),
        (tiny.chat, {"use_tqmd": True}, "chat has no option 'use_tqmd'; did you mean 'use_tqdm'? Options: messages, "),
    ):
        with pytest.raises(TypeError, match=re.escape(hint)):
            call(question, **options)  # type: ignore[operator]


def test_the_included_model_is_called_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with LLM("tiny", device="cpu") as llm:
        assert repr(llm).startswith("LLM('tiny', cpu, ")
        [answer] = llm.chat([{"role": "user", "content": "What is 312 + 48?"}], SamplingParams(temperature=0), False)
    assert answer.text == "312 + 48 = 360"


def test_a_recommendation_out_of_range_names_its_file(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(random_checkpoint(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"top_k": -7}')
    message = r"generation_config\.json of .*: top_k=-7 must be at least -1"
    with LLM(tmp_path, device="cpu") as llm, pytest.raises(ModelError, match=message):
        _ = llm.default_sampling_params


def test_ctrl_c_anywhere_in_the_bookkeeping_leaves_the_engine_as_good_as_new(llm: LLM) -> None:
    """Ctrl-C at the k-th line that the scheduler or the block manager executes, for many k."""
    expected = llm.generate([[1, 2, 3], [4]], SHORT, use_tqdm=False)
    lines_left = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines_left
        if Path(frame.f_code.co_filename).name not in ("scheduler.py", "block_manager.py"):
            return None if event == "call" else trace
        if event == "line":
            lines_left -= 1
            if lines_left == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    num_interrupted = 0
    for count in range(3, 900, 37):
        lines_left = count
        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            llm.generate([[1, 2, 3], [5] * 40], SHORT, use_tqdm=False)
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(previous)
        assert llm.is_finished()
        assert llm.engine.block_manager.num_used_blocks == 0
        again = llm.generate([[1, 2, 3], [4]], SHORT, use_tqdm=False)
        assert [output.token_ids for output in again] == [output.token_ids for output in expected]
    assert num_interrupted > 5
