"""Steps of whole texts against the steps of the scheduler, which anyone who watches steps gets."""

# ruff: noqa: F811 (arguments are named as fixtures)

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoinfer import LLM
from nanoinfer.engine.text_steps import TextSteps
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"num_kvcache_blocks": 7}, {"max_num_seqs": 64, "max_num_batched_tokens": 300}]
)
def test_embeddings_are_those_of_the_scheduler(
    encoder: Callable[[str], Path],
    family: str,
    options: dict[str, Any],
) -> None:
    with LLM(encoder(family), **{**ENCODERS, **options}) as llm:
        found = llm.embed(MANY, use_tqdm=False)
        counts = llm.get_metrics()
        expected = watched(llm, lambda: llm.embed(MANY, use_tqdm=False))
        both = llm.get_metrics()
    assert [one.prompt_token_ids for one in found] == MANY
    first = [one.request_id for one in found]
    assert first == [one.request_id - len(MANY) for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours.outputs.embedding - theirs.outputs.embedding).max() < 1e-6
    assert counts.num_prompt_tokens == counts.prefill_tokens == sum(map(len, MANY)) == both.prefill_tokens / 2
    assert counts.num_prefill_steps > 1
    assert both.num_used_blocks == 0


def test_labels_of_each_token_are_those_of_the_scheduler(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertForTokenClassification", num_labels=3)
    with LLM(tmp_path, **ENCODERS) as llm:
        found = llm.classify(MANY, use_tqdm=False)
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


def test_a_text_that_is_aborted_has_no_values(encoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(encoder("Bert"), **ENCODERS) as llm:
        [first] = llm.embed(PROMPTS[:1], use_tqdm=False)
        launch = TextSteps._launch

        def launch_and_abort(*args: Any) -> Any:
            llm.abort(first.request_id + 1)
            return launch(*args)

        monkeypatch.setattr(TextSteps, "_launch", launch_and_abort)
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
        assert llm.queue.has_unfinished_requests() is False
    assert all(np.array_equal(a.outputs.embedding, b.outputs.embedding) for a, b in zip(found, expected, strict=True))
