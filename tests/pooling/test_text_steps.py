"""Steps of whole texts against the steps of the scheduler, which anyone who watches steps gets."""

# ruff: noqa: F811 (arguments are named as fixtures)

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer import LLM, PoolingParams
from nanoinfer.engine import request_queue
from nanoinfer.engine.preparer import Portions
from nanoinfer.engine.request_queue import Inbox, RequestQueue
from nanoinfer.pooling_calls import pooling_steps
from nanoinfer.pooling_calls.pooled_output import PooledEmbedding, activate
from nanoinfer.pooling_calls.pooling_steps import PoolingSteps
from tests.models.test_architectures import draw_options, save_random_model
from tests.pooling.test_decoders import SMALL
from tests.pooling.test_encoders import ENCODERS, FAMILIES, PROMPTS, encoder, save_encoder  # noqa: F401 (a fixture)

MANY = [ids[: 1 + index % len(ids)] for index, ids in enumerate(PROMPTS * 5)]


def watched(llm: LLM, call: Callable[[], list[Any]]) -> list[Any]:
    """The outputs of a call whose steps are watched."""
    steps: list[Any] = []
    stop = llm.on_step(steps.append)
    outputs = call()
    stop()
    assert steps
    return outputs


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each step of whole texts has had."""
    counts: list[int] = []
    pack = pooling_steps.pack_texts

    def count(requests: list[Any], block_size: int) -> Any:
        counts.append(len(requests))
        return pack(requests, block_size)

    monkeypatch.setattr(pooling_steps, "pack_texts", count)
    return counts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"num_kvcache_blocks": 7}, {"max_num_seqs": 64, "max_num_batched_tokens": 300}]
)
def test_embeddings_are_those_of_the_scheduler(
    encoder: Callable[[str], Path],
    family: str,
    options: dict[str, Any],
    packed: list[int],
) -> None:
    with LLM(encoder(family), **{**ENCODERS, **options}) as llm:
        found = llm.embed(MANY, use_tqdm=False)
        counts = llm.get_metrics()
        assert sum(packed) == len(MANY)
        expected = watched(llm, lambda: llm.embed(MANY, use_tqdm=False))
        both = llm.get_metrics()
        assert sum(packed) == len(MANY)
    assert [one.prompt_token_ids for one in found] == MANY
    first = [one.request_id for one in found]
    assert first == [one.request_id - len(MANY) for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours.outputs.embedding - theirs.outputs.embedding).max() < 1e-6
    assert counts.num_prompt_tokens == counts.prefill_tokens == sum(map(len, MANY)) == both.prefill_tokens / 2
    assert counts.num_prefill_steps > 1
    assert both.num_used_blocks == 0


def test_a_step_has_no_more_texts_than_fit_into_the_cache(
    encoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 300, "kvcache_block_size": 16, "num_kvcache_blocks": 12}
    pack, num_blocks = pooling_steps.pack_texts, []

    def count(requests: list[Any], block_size: int) -> Any:
        num_blocks.append(sum(-(-len(request.token_ids) // block_size) for request in requests))
        return pack(requests, block_size)

    monkeypatch.setattr(pooling_steps, "pack_texts", count)
    with LLM(encoder("Bert"), **{**ENCODERS, **options}) as llm:
        llm.embed(MANY, use_tqdm=False)
    assert sum(num_blocks) == sum(-(-len(ids) // 16) for ids in MANY)
    assert 10 < max(num_blocks) <= 12


def test_labels_of_each_token_are_those_of_the_scheduler(tmp_path: Path, packed: list[int]) -> None:
    save_encoder(tmp_path, "BertForTokenClassification", num_labels=3)
    with LLM(tmp_path, **ENCODERS) as llm:
        found = llm.classify(MANY, use_tqdm=False)
        assert sum(packed) == len(MANY)
        expected = watched(llm, lambda: llm.classify(MANY, use_tqdm=False))
    for ours, theirs, ids in zip(found, expected, MANY, strict=True):
        assert ours.outputs.probs.shape == (len(ids), 3)
        assert np.abs(ours.outputs.probs - theirs.outputs.probs).max() < 1e-6


def test_a_call_serves_texts_that_come_beside_others(encoder: Callable[[str], Path]) -> None:
    """Steps of several threads take turns, whole texts' and the scheduler's."""
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        expected = [one.outputs.embedding for one in llm.embed(MANY, use_tqdm=False)]
        found: dict[int, list[Any]] = {}

        def run(index: int) -> None:
            wanted = {"hidden_states": [1]} if index % 2 else {}
            found[index] = [one.outputs.embedding for one in llm.embed(MANY, use_tqdm=False, **wanted)]

        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    for embeddings in found.values():
        assert all(np.abs(ours - theirs).max() < 1e-6 for ours, theirs in zip(embeddings, expected, strict=True))


def test_texts_of_one_step_have_the_parameters_of_each(encoder: Callable[[str], Path], packed: list[int]) -> None:
    params = [PoolingParams(dimensions=8 + index // 2 % 3, use_activation=index % 5 > 1) for index in range(len(MANY))]
    with LLM(encoder("Bert"), **{**ENCODERS, "max_num_seqs": 64, "max_num_batched_tokens": 2000}) as llm:
        found = llm.embed(MANY, params, use_tqdm=False)
        assert max(packed) > 20
        expected = watched(llm, lambda: llm.embed(MANY, params, use_tqdm=False))
    for ours, theirs, asked in zip(found, expected, params, strict=True):
        assert ours.outputs.embedding.shape == (asked.dimensions,)
        assert np.abs(ours.outputs.embedding - theirs.outputs.embedding).max() < 1e-6
        assert ours.outputs.embedding.base is None  # or one that is kept would keep all of its step


def test_texts_whose_values_are_nan_are_named(encoder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        llm.embed(PROMPTS[:3], use_tqdm=False)
        assert "NaN" not in caplog.text
        runner: Any = llm.engine.runner
        with torch.inference_mode():
            runner.model.model.embedding_norm.weight.fill_(torch.nan)
        ids = [output.request_id for output in llm.embed(PROMPTS[:3], use_tqdm=False)]
    for request_id in ids:
        assert caplog.text.count(f"request {request_id}: the model's values are NaN or infinite") == 1


def test_texts_that_cannot_be_served_come_back_in_the_places_of_the_others(
    encoder: Callable[[str], Path], packed: list[int]
) -> None:
    given: list[Any] = [[], *PROMPTS[:3], [5] * 97, *PROMPTS[3:], [128]]
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        expected = llm.embed(PROMPTS, use_tqdm=False)
        outputs = llm.embed(given, use_tqdm=False, on_error="return")
        assert sum(packed) == 2 * len(PROMPTS)
        assert llm.engine.is_finished()
        [nothing] = llm.embed([[]], use_tqdm=False, on_error="return")
    kinds = {0: "empty_prompt", 4: "prompt_too_long", len(given) - 1: "invalid_token_id"}
    assert {index: output.error_kind for index, output in enumerate(outputs) if output.error} == kinds
    assert is_close([outputs[index] for index in range(len(given)) if index not in kinds], expected)
    assert all(np.isnan(outputs[index].embedding).all() for index in kinds)
    assert len({output.request_id for output in outputs}) == len(given)
    assert nothing.error_kind == "empty_prompt"


def test_small_scores_are_accurate_and_nan_stays_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = activate(np.float32([-30, 0, 100, np.nan]), "Sigmoid")
    assert scores[:3] == pytest.approx([9.357623e-14, 0.5, 1], rel=1e-5)
    assert np.isnan(scores[3])


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_a_text_that_is_aborted_has_no_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    save_encoder(tmp_path, architecture, num_labels=1)
    launch = PoolingSteps._launch

    def launch_and_abort(self: PoolingSteps, *args: Any) -> Any:
        llm.abort(3)
        return launch(self, *args)

    monkeypatch.setattr(PoolingSteps, "_launch", launch_and_abort)
    with LLM(tmp_path, **ENCODERS) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        probs = {output.request_id: output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)}
    assert [request_id for request_id in sorted(probs) if np.isnan(probs[request_id]).any()] == [3]
    assert probs[3].size == 1


def test_a_text_that_is_aborted_has_no_values(encoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        [first] = llm.embed(PROMPTS[:1], use_tqdm=False)
        launch = PoolingSteps._launch

        def launch_and_abort(*args: Any) -> Any:
            llm.abort(first.request_id + 1)
            return launch(*args)

        monkeypatch.setattr(PoolingSteps, "_launch", launch_and_abort)
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        monkeypatch.undo()
        assert [bool(np.isnan(one.outputs.embedding).all()) for one in outputs].count(True) == 1
        assert next(one.request_id for one in outputs if np.isnan(one.outputs.embedding).any()) == first.request_id + 1
        [again] = llm.embed(PROMPTS[:1], use_tqdm=False)
    assert np.array_equal(first.outputs.embedding, again.outputs.embedding)


def test_a_step_that_fails_leaves_a_usable_engine(
    encoder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        expected = llm.embed(MANY, use_tqdm=False)
        runner, calls = llm.engine.runner, iter(range(100))
        launch = runner.launch

        def fail_once(packet: Any) -> Any:
            if next(calls) == 2:
                raise RuntimeError("the test says so")
            return launch(packet)

        monkeypatch.setattr(runner, "launch", fail_once)
        with pytest.raises(RuntimeError, match="the test says so"):
            llm.embed(MANY, use_tqdm=False)
        found = llm.embed(MANY, use_tqdm=False)
        assert llm.queue.engine.is_finished()
    assert all(np.array_equal(a.outputs.embedding, b.outputs.embedding) for a, b in zip(found, expected, strict=True))


def run_to_the_end(queue: RequestQueue, inbox: Inbox) -> None:
    while not inbox.is_complete:
        queue.step()


def test_texts_of_a_step_that_fails_are_computed_by_the_next_one_of_any_call(
    encoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        queue, inboxes = llm.pooling_calls.text_queue, [Inbox(), Inbox()]
        expected = llm.embed([*PROMPTS, *PROMPTS], use_tqdm=False)
        for inbox in inboxes:
            portions = llm.pooling_calls.prepare(PooledEmbedding, PROMPTS)
            queue.add_requests(portions.take(), inbox)
        assert llm.engine.num_unfinished() == 2 * len(PROMPTS)
        queue.step()
        for name in ("wait", "launch"):
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine.runner, name, lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    run_to_the_end(queue, inboxes[0])
        queue.drop(inboxes[0])
        run_to_the_end(queue, inboxes[1])
        found = sorted(inboxes[1].outputs, key=lambda output: output.request_id)
        assert is_close(found, [expected[index] for index in portions.order])
        assert inboxes[0].outputs == []
        assert llm.engine.is_finished()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    save_random_model(
        folder, "Qwen3ForCausalLM", draw_options("Qwen3ForCausalLM", 0) | {"use_sliding_window": False}, 0
    )
    return folder


DECODER: dict[str, Any] = {**SMALL, "runner": "pooling", "max_num_batched_tokens": 96, "max_num_seqs": 3}
ALIKE = [[*range(40), *ids[:20]] for ids in MANY[:6]]


LONG = [[*ids, *ids[:60]] for ids in PROMPTS[:3] * 4]  # 150, 123 and 58 tokens


def is_close(found: list[Any], expected: list[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.abs(ours.outputs.embedding - theirs.outputs.embedding).max() < 1e-5 for ours, theirs in pairs)


def test_a_decoder_that_only_pools_has_them_too(decoder: Path) -> None:
    """What the scheduler caches before is not read after these steps have taken its blocks."""
    with LLM(decoder, **DECODER) as llm:
        alike = llm.embed(ALIKE, use_tqdm=False)
        cached = llm.get_metrics().cached_tokens
        assert cached >= 40 * (len(ALIKE) - 3), "texts that begin alike go through the scheduler"
        found = llm.embed(MANY, use_tqdm=False)
        metrics = llm.get_metrics()
        assert (metrics.cached_tokens, metrics.num_used_blocks) == (cached, 0)
        assert is_close(llm.embed(ALIKE, use_tqdm=False), alike)
        assert is_close(found, watched(llm, lambda: llm.embed(MANY, use_tqdm=False)))
        long = [ids * 2 for ids in PROMPTS]
        assert is_close(llm.embed(long, use_tqdm=False), watched(llm, lambda: llm.embed(long, use_tqdm=False)))


def test_others_end_before_their_rows_are_taken(decoder: Path, packed: list[int]) -> None:
    """Those have texts of several steps."""
    with LLM(decoder, **DECODER) as llm:
        expected, expected_long = llm.embed(MANY, use_tqdm=False), llm.embed(LONG, use_tqdm=False)
        assert sum(packed) == len(MANY)
        wrong: list[int] = []

        def run(index: int) -> None:
            for _ in range(5):
                texts, its = (MANY, expected) if index % 2 else (LONG, expected_long)
                if not is_close(llm.embed(texts, use_tqdm=False), its):
                    wrong.append(index)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sum(packed) == 11 * len(MANY)
        assert llm.get_metrics().num_used_blocks == 0


def test_what_others_cache_between_two_steps_is_forgotten(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(decoder, **{**DECODER, "num_kvcache_blocks": 24}) as llm:
        expected, before = llm.embed(MANY, use_tqdm=False), llm.embed(ALIKE, use_tqdm=False)
        step, between = PoolingSteps.step, []

        def step_after_others(self: PoolingSteps) -> None:
            between.append(is_close(llm.embed(ALIKE, use_tqdm=False), before))
            step(self)

        monkeypatch.setattr(PoolingSteps, "step", step_after_others)
        assert is_close(llm.embed(MANY, use_tqdm=False), expected)
    assert all(between)
    assert len(between) > 3


def test_a_long_text_among_later_ones_goes_through_the_scheduler(decoder: Path, packed: list[int]) -> None:
    texts = [*MANY, *LONG[:2], *MANY]
    with LLM(decoder, **DECODER) as llm:
        expected = watched(llm, lambda: llm.embed(texts, use_tqdm=False))
        assert not packed
        prepared = llm.pooling_calls.prepare(PooledEmbedding, texts).take()
        portions = Portions(lambda indices, _: [prepared[index] for index in indices], range(len(texts)), 256)
        found: list[Any] = llm.pooling_calls.text_queue.complete(portions, lambda _: None)
        order = llm.pooling_calls.prepare(PooledEmbedding, texts).order
    assert is_close([found[order.index(index)] for index in range(len(texts))], expected)
    assert sum(packed) == 2 * len(MANY)


def test_requests_of_others_that_are_paused_give_up_their_rows(decoder: Path, packed: list[int]) -> None:
    with LLM(decoder, **DECODER) as llm:
        expected, expected_alike = llm.embed(MANY, use_tqdm=False), llm.embed(ALIKE, use_tqdm=False)
        portions, inbox = llm.pooling_calls.prepare(PooledEmbedding, ALIKE), Inbox()
        ids = llm.queue.add_requests(portions.take(), inbox)
        llm.pause(ids)
        assert is_close(llm.embed(MANY, use_tqdm=False), expected)
        assert sum(packed) == 2 * len(MANY)
        llm.resume(ids)
        while not inbox.is_complete:
            llm.queue.step()
        by_id = sorted(inbox.outputs, key=lambda output: output.request_id)
        found = dict(zip(portions.order, by_id, strict=True))
        assert is_close([found[index] for index in range(len(ALIKE))], expected_alike)


def test_an_interrupt_leaves_nothing_behind(encoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of any scope that postpones one."""
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        expected = llm.embed(MANY, use_tqdm=False)
        for when in range(6):
            scopes = iter(range(100))

            @contextmanager
            def interrupted(when: int = when, scopes: Any = scopes) -> Iterator[None]:
                yield
                if next(scopes) == when:
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(request_queue, "postponed_interrupt", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    llm.embed(MANY, use_tqdm=False)
            assert llm.queue.engine.is_finished()
        assert is_close(llm.embed(MANY, use_tqdm=False), expected)
