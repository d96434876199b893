"""How a request is sampled, through the whole engine: filters, penalties, seeds, several samples, log-probabilities."""

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, Logprob, RequestError, RequestOutput, SamplingParams, Score, tiny_model_path
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.sampling import logprobs
from nanoinfer.text.tokenizer import Tokenizer

Checkpoint = Callable[..., Path]
QUESTION = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
FREE = SamplingParams(max_tokens=12, ignore_eos=True)
GREEDY = replace(FREE, temperature=0)
# One of each kind, alone and together.
KINDS = [
    FREE,
    GREEDY,
    replace(FREE, top_k=3),
    replace(FREE, top_p=0.5, seed=7),
    replace(FREE, min_p=0.2, temperature=2.0),
    replace(FREE, top_k=20, top_p=0.9, min_p=0.01, temperature=0.6),
    replace(FREE, presence_penalty=1.5, frequency_penalty=0.5, seed=-5),
    replace(GREEDY, repetition_penalty=1.5),
    replace(FREE, repetition_penalty=0.7, top_k=5, logprobs=2),
    replace(FREE, ignore_eos=False, stop_token_ids=list(range(0, 512, 2)), min_tokens=4),
    replace(GREEDY, logprobs=3, prompt_logprobs=1),
    replace(FREE, n=3, top_p=0.9, logprobs=0, seed=11),
    replace(FREE, logit_bias={7: 4.0, 300: -100.0, 8: 3.5}, logprobs=1, repetition_penalty=1.2),
    replace(GREEDY, logit_bias={9: 2.0, 400: 3.0}),
]


def prompts(*lengths: int, vocab_size: int = 512, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts(20, 3, 33, 16, 17, 64, 5, 40, 31, 9, 50, 37, 12, 28)


def said(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of all samples of all requests."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def run(llm: LLM, params: list[SamplingParams] = KINDS) -> list[RequestOutput]:
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.engine.block_manager.num_used_blocks == 0
    assert llm.is_finished()
    return outputs


def assert_same(actual: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert said(actual) == said(expected)
    for one, two in zip(actual, expected, strict=True):
        assert_same_logprobs(one, two)


def assert_same_logprobs(one: RequestOutput, two: RequestOutput) -> None:
    """Equal but for the rounding of other batch shapes."""
    places = [(one.prompt_logprobs, two.prompt_logprobs)]
    places += [(a.logprobs, b.logprobs) for a, b in zip(one.outputs, two.outputs, strict=True)]
    for mine, theirs in places:
        assert (mine is None) == (theirs is None)
        for a, b in zip(mine or [], theirs or [], strict=True):
            assert (a is None) == (b is None)
            assert {k: v.rank for k, v in (a or {}).items()} == {k: v.rank for k, v in (b or {}).items()}
            for token_id in a or {}:
                assert a[token_id].logprob == pytest.approx(b[token_id].logprob, abs=1e-3)


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", kvcache_block_size=16, num_kvcache_blocks=256, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(random_checkpoint: Checkpoint) -> list[RequestOutput]:
    """What a new engine says to the prompts; without seeds of their own, requests draw by their numbers."""
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16) as llm:
        return run(llm)


# --- the same whatever happens around it ---


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False, "enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 17},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_a_mixed_batch_says_the_same_under_all_options(
    random_checkpoint: Checkpoint, expected: list[RequestOutput], options: dict
) -> None:
    with LLM(random_checkpoint(), device="cpu", **({"kvcache_block_size": 16} | options)) as llm:
        assert_same(run(llm), expected)


def test_preemption_changes_nothing(random_checkpoint: Checkpoint, llm: LLM) -> None:
    params = [replace(item, max_tokens=24, seed=i) for i, item in enumerate(KINDS)]
    expected = run(llm, params)
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 16, "max_model_len": 128}
    with LLM(random_checkpoint(), device="cpu", **options) as tight:
        tight.engine.scheduler.reserved_tokens = 0
        assert_same(run(tight, params), expected)
        assert tight.get_metrics().num_preemptions > 3


def test_a_step_that_fails_changes_nothing(
    random_checkpoint: Checkpoint, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16, max_num_batched_tokens=50) as llm:
        ids = [llm.add_request(*request) for request in zip(PROMPTS, KINDS, strict=True)]
        assert llm.engine.runner is not None
        original, count = llm.engine.runner.wait, 0

        def fail_at_times(handle):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            return 1 / 0 if count in (1, 3, 9) else original(handle)

        monkeypatch.setattr(llm.engine.runner, "wait", fail_at_times)
        outputs: dict[int, RequestOutput] = {}
        while not llm.is_finished():
            try:
                outputs |= {output.request_id: output for output in llm.step()}
            except ZeroDivisionError:
                continue
        assert count > 9
    assert_same([outputs[request_id] for request_id in ids], expected)


def test_each_kind_says_alone_what_it_says_beside_others(llm: LLM) -> None:
    params = [replace(item, seed=100 + i) for i, item in enumerate(KINDS)]
    together = said(run(llm, params))
    for prompt, item, expected in reversed(list(zip(PROMPTS, params, together, strict=True))):
        assert said(llm.generate([prompt], item, use_tqdm=False)) == [expected]


def test_neither_penalties_nor_filters_pass_to_the_next_request_in_the_row(random_checkpoint: Checkpoint) -> None:
    narrow, free = replace(FREE, top_k=1), replace(FREE, seed=5)
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=2) as llm:
        [alone] = llm.generate([PROMPTS[0]], free, use_tqdm=False)
        *_, beside = llm.generate([PROMPTS[0]] * 3, [narrow, replace(narrow, max_tokens=2), free], use_tqdm=False)
        params = [GREEDY, GREEDY, *[replace(GREEDY, repetition_penalty=2.0, logprobs=1)] * 2, GREEDY, GREEDY]
        one, _, other, _, again, _ = llm.generate([PROMPTS[0]] * 6, params, use_tqdm=False)
    assert beside.token_ids == alone.token_ids
    assert one.token_ids == again.token_ids != other.token_ids
    assert again.outputs[0].logprobs is None


# --- seeds and samples ---


def test_a_seed_decides_and_other_requests_do_not_matter(random_checkpoint: Checkpoint, llm: LLM) -> None:
    seeded = replace(FREE, seed=42)
    first, plain, second = llm.generate([PROMPTS[0]] * 3, [seeded, FREE, seeded], use_tqdm=False)
    with LLM(random_checkpoint(), device="cpu", seed=2) as another:
        third, other = another.generate([PROMPTS[0]] * 2, [seeded, replace(FREE, seed=43)], use_tqdm=False)
    assert first.token_ids == second.token_ids == third.token_ids
    assert len({tuple(output.token_ids) for output in (first, plain, other)}) == 3


@pytest.mark.parametrize("seed", [None, 3])
def test_the_samples_of_a_prompt_differ(llm: LLM, seed: int | None) -> None:
    [output] = llm.generate([PROMPTS[0]], replace(FREE, n=5, seed=seed), use_tqdm=False)
    [single] = llm.generate([PROMPTS[0]], replace(FREE, seed=seed), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == list(range(5))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 5
    assert (output.token_ids, output.text) == (output.outputs[0].token_ids, output.outputs[0].text)
    assert (single.token_ids == output.token_ids) == (seed is not None), "the first sample is that of n=1"


def test_four_samples_hold_the_blocks_of_one_prompt_and_four_tails(random_checkpoint: Checkpoint) -> None:
    [prompt] = prompts(1000)
    params = replace(FREE, n=4, max_tokens=20)
    for caching, num_blocks in ((True, 3 + 4), (False, 4 * 4)):
        with LLM(random_checkpoint(), device="cpu", enable_prefix_caching=caching) as llm:
            llm.add_request(prompt, params)
            for _ in range(5):
                llm.step()
            assert llm.get_metrics().num_used_blocks == num_blocks
            outputs: list[RequestOutput] = []
            while not llm.is_finished():
                outputs += llm.step()
            assert llm.get_metrics().num_used_blocks == 0
            assert [len(completion.token_ids) for completion in outputs[0].outputs] == [20] * 4


def test_a_request_is_finished_with_its_last_sample_and_aborted_with_all(random_checkpoint: Checkpoint) -> None:
    params = replace(FREE, n=3, max_tokens=60, ignore_eos=False, stop_token_ids=list(range(0, 512, 24)))
    with LLM(random_checkpoint(num_hidden_layers=3), device="cpu", kvcache_block_size=16, max_num_seqs=2) as llm:
        seen: list[RequestOutput] = []
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False, priority=[0, 0, 9, 0], on_finish=seen.append)
        assert sorted(seen, key=lambda output: output.request_id) == outputs
        assert seen[0].prompt_token_ids == PROMPTS[2]
        lengths = [len(completion.token_ids) for output in outputs for completion in output.outputs]
        assert len(set(lengths)) > 3, "they ended at different times"
        assert all(output.metrics.time_to_first_token is not None for output in outputs)
        request_id = llm.add_request(PROMPTS[0], replace(params, stop_token_ids=None, max_tokens=90))
        for _ in range(4):
            llm.step()
        llm.abort(request_id)
        [aborted] = llm.step()
        assert [completion.finish_reason for completion in aborted.outputs] == ["abort"] * 3
        assert [len(completion.token_ids) > 0 for completion in aborted.outputs] == [True, True, False]
        assert llm.is_finished()
        assert llm.get_metrics().num_used_blocks == 0


def test_a_stream_says_whose_each_chunk_is(tiny: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=5, stop="8")
    expected = tiny.generate([QUESTION, "spell"], params, use_tqdm=False)
    chunks = list(tiny.stream([QUESTION, "spell"], params))
    for index, output in enumerate(expected):
        for completion in output.outputs:
            mine = [chunk for chunk in chunks if (chunk.index, chunk.sample) == (index, completion.index)]
            assert "".join(chunk.text for chunk in mine) == completion.text
            assert [token_id for chunk in mine for token_id in chunk.token_ids] == completion.token_ids
            assert mine[-1].finish_reason == completion.finish_reason
    for chunk in tiny.stream([QUESTION], params):
        assert chunk.token_ids
        break
    tiny.step()
    assert tiny.is_finished()
    assert tiny.get_metrics().num_used_blocks == 0


# --- filters, penalties, min_tokens ---


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_decoding_with_a_repetition_penalty_is_that_of_transformers(
    tiny: LLM, reference_model: Callable[[Path], torch.nn.Module], penalty: float
) -> None:
    model = reference_model(tiny_model_path())
    texts = [QUESTION, "Sort 31, 4, 15, 9.", "the"]
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, repetition_penalty=penalty)
    for text, output in zip(texts, tiny.generate(texts, params, use_tqdm=False), strict=True):
        ids = torch.tensor([tiny.encode(text)])
        expected = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=25,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=penalty,
        )
        assert output.token_ids == expected[0, ids.shape[1] :].tolist()


def test_biases_are_added_before_penalties_and_change_no_logprob(
    random_checkpoint: Checkpoint, llm: LLM, reference_model: Callable[[Path], torch.nn.Module]
) -> None:
    penalty, model = 1.3, reference_model(random_checkpoint())
    biases = [{11: 6.0, 499: 5.5, 30: -50.0}, {511: 100.0}, {3: 0.5, 7: 6.5}, dict.fromkeys(range(500), -100.0)]
    params = [replace(GREEDY, logit_bias=bias, repetition_penalty=penalty, logprobs=0) for bias in biases]
    outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    plain = llm.generate(PROMPTS[:4], replace(GREEDY, repetition_penalty=penalty), use_tqdm=False)
    assert all(ours != theirs for ours, theirs in zip(said(outputs), said(plain), strict=True))
    for output, bias in zip(outputs, biases, strict=True):
        known = [*output.prompt_token_ids, *output.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([known])).logits[0].tolist()
        for place, token_id in enumerate(output.token_ids, len(output.prompt_token_ids)):
            scores = [logit + bias.get(i, 0.0) for i, logit in enumerate(logits[place - 1])]
            for seen in set(known[:place]):
                scores[seen] *= penalty if scores[seen] < 0 else 1 / penalty
            assert token_id == max(range(512), key=lambda i: scores[i])
        raw = reference_logprobs(model, known)[len(output.prompt_token_ids) - 1 :]
        expected = raw.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
        found = [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs or []]
        assert found == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_strong_presence_penalty_repeats_nothing_and_a_negative_one_does(llm: LLM) -> None:
    options = [{"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"frequency_penalty": -2.0}]
    params = [replace(FREE, max_tokens=60, temperature=0.3, seed=1, **option) for option in options]  # type: ignore[arg-type]
    outputs = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
    rarely, often = (60 - len(set(output.token_ids)) for output in outputs)
    assert rarely < 12 < 40 < often


@pytest.mark.parametrize(
    "greedy",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0, "stop_token_ids": [512], "min_tokens": 5}],
    ids=str,
)
def test_the_narrowest_filters_are_greedy_and_a_stop_token_out_of_the_vocabulary_does_no_harm(
    llm: LLM, greedy: dict
) -> None:
    one, two = (llm.generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, replace(FREE, **greedy)))
    assert said(one) == said(two)


@pytest.mark.parametrize("overlap", [True, False])
def test_before_min_tokens_no_stop_token_is_drawn_and_no_stop_string_counts(overlap: bool) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40)
    with LLM(tiny_model_path(), device="cpu", overlap=overlap) as llm:
        stops = llm.engine.scheduler.stop_token_ids
        [short] = llm.generate(QUESTION, greedy, use_tqdm=False)
        num_tokens = len(short.token_ids)
        assert short.token_ids[-1] in stops
        limits = (num_tokens - 1, num_tokens, 20)
        params = [replace(greedy, min_tokens=min_tokens) for min_tokens in limits]
        for min_tokens, output in zip(limits, llm.generate([QUESTION] * 3, params, use_tqdm=False), strict=True):
            assert not stops.intersection(output.token_ids[:min_tokens])
            assert (output.token_ids == short.token_ids) == (min_tokens < num_tokens)
            assert len(output.token_ids) > min_tokens or output.finish_reason == "length"
        ignored = replace(greedy, max_tokens=num_tokens + 2, ignore_eos=True)
        [free] = llm.generate(QUESTION, ignored, use_tqdm=False)
        assert free.token_ids[num_tokens - 1] in stops
        [output] = llm.generate(QUESTION, replace(ignored, min_tokens=num_tokens), use_tqdm=False)
        assert not stops.intersection(output.token_ids[:num_tokens]), "a stop token that is ignored is forbidden too"
        primes = "<|im_start|>user\nlist all prime numbers within 100<|im_end|>\n<|im_start|>assistant\n"
        [free] = llm.generate(primes, replace(greedy, stop=", 1"), use_tqdm=False)
        assert free.text == "2, 3, 5, 7"
        longer = replace(greedy, stop=", 1", min_tokens=len(free.token_ids))
        [output] = llm.generate(primes, longer, use_tqdm=False)
        assert (output.text, output.outputs[0].stop_reason) == ("2, 3, 5, 7, 11", ", 1")


# --- log-probabilities ---


@torch.inference_mode()
def reference_logprobs(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """(num_tokens - 1, vocab_size): of each token after the first."""
    return model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(dim=1)


def check_logprobs(found: dict[int, Logprob], token_id: int, expected: torch.Tensor, num_best: int) -> None:
    assert set(found) == {token_id, *expected.topk(num_best).indices.tolist()}
    assert next(iter(found)) == token_id, "the token that is there comes first"
    for its_id, entry in found.items():
        assert entry.logprob == pytest.approx(expected[its_id].item(), abs=1e-3)
        assert entry.rank == 1 + int((expected > expected[its_id]).sum())


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40}], ids=str)
def test_logprobs_are_the_models_own(
    random_checkpoint: Checkpoint, reference_model: Callable[[Path], torch.nn.Module], options: dict
) -> None:
    folder = random_checkpoint()
    params = replace(FREE, temperature=0.7, top_k=10, presence_penalty=1.0, logprobs=3, prompt_logprobs=2)
    some = [*prompts(100, 1, 70), PROMPTS[0]]
    with LLM(folder, device="cpu", kvcache_block_size=16, **options) as llm:
        llm.generate(some, replace(GREEDY, max_tokens=1), use_tqdm=False)  # the cache is warm, and is not to be used
        outputs = llm.generate(some, params, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0] * 4
        again = llm.generate(some, replace(params, prompt_logprobs=None, max_tokens=1), use_tqdm=False)
        assert [output.num_cached_tokens for output in again] == [96, 0, 64, 16]
    for output in outputs:
        expected = reference_logprobs(reference_model(folder), output.prompt_token_ids + output.token_ids)
        completion, num_prompt = output.outputs[0], len(output.prompt_token_ids)
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert output.prompt_logprobs[0] is None
        for position in range(1, num_prompt):
            entry = output.prompt_logprobs[position]
            assert entry is not None
            check_logprobs(entry, output.prompt_token_ids[position], expected[position - 1], 2)
        pairs = list(zip(completion.logprobs, output.token_ids, strict=True))
        for place, (entry, token_id) in enumerate(pairs):
            check_logprobs(entry, token_id, expected[num_prompt - 1 + place], 3)
        total = sum(entry[token_id].logprob for entry, token_id in pairs)
        assert completion.cumulative_logprob == pytest.approx(total)


def test_of_several_samples_one_looks_at_the_prompt_and_all_at_themselves(tiny: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=6, logprobs=1, prompt_logprobs=0, seed=9, ignore_eos=True)
    [output] = tiny.generate(QUESTION, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * (len(output.prompt_token_ids) - 1)
    for completion in output.outputs:
        assert [next(iter(entry)) for entry in completion.logprobs or []] == completion.token_ids
        for entry, token_id in zip(completion.logprobs or [], completion.token_ids, strict=True):
            assert entry[token_id].decoded_token == tiny.decode([token_id], skip_special_tokens=False)


def test_the_texts_of_a_prompts_tokens_are_made_when_somebody_looks(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, token_texts = [], Tokenizer.token_texts

    def note(self, *args):  # type: ignore[no-untyped-def]
        made.append(args)
        return token_texts(self, *args)

    monkeypatch.setattr(Tokenizer, "token_texts", note)
    prompt = "Spell café 🦜" * 20  # whose characters take several tokens
    [output] = tiny.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert made == []
    found, ids = output.prompt_logprobs or [], output.prompt_token_ids
    texts = [entry[token_id].decoded_token for entry, token_id in zip(found[1:], ids[1:], strict=True) if entry]
    assert "".join(text or "" for text in texts) == prompt.removeprefix(tiny.decode(ids[:1]))
    assert len(made) == 1
    assert len(repr(output)) < 1000
    assert pickle.loads(pickle.dumps(output)) == output


@pytest.mark.parametrize(("num_best", "most_at_once"), [(0, 128), (20, 128), (-1, 64)])
def test_logits_are_computed_a_few_prompt_tokens_at_a_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_best: int, most_at_once: int
) -> None:
    monkeypatch.setattr(logprobs, "NUM_COPIES", 2)
    model = llm.engine.runner.model  # type: ignore[union-attr]
    compute_logits, counts = model.compute_logits, []

    def note(hidden, out=None):  # type: ignore[no-untyped-def]
        counts.append(len(hidden))
        return compute_logits(hidden, out)

    monkeypatch.setattr(model, "compute_logits", note)
    [output] = llm.generate(prompts(300), replace(GREEDY, max_tokens=2, prompt_logprobs=num_best), use_tqdm=False)
    assert max(counts) == most_at_once
    assert all(entry is not None for entry in (output.prompt_logprobs or [])[1:])


def test_a_prompt_that_wants_all_of_the_vocabulary_does_not_widen_its_neighbours(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do its own positions gather on the device: each piece goes to the host."""
    shapes = []
    to_host = logprobs.LogprobsTensors.to_host

    def note(self):  # type: ignore[no-untyped-def]
        shapes.append(tuple(self.logprobs.shape))
        return to_host(self)

    monkeypatch.setattr(logprobs.LogprobsTensors, "to_host", note)
    params = [replace(GREEDY, max_tokens=1, prompt_logprobs=num_best) for num_best in (0, -1, 2)]
    outputs = llm.generate(prompts(200, 100, 50), params, use_tqdm=False)
    assert sorted(shapes) == [(35, 513), (64, 513), (248, 3)]
    for output, num_best in zip(outputs, (0, 512, 2), strict=True):
        assert {len(entry or {}) - num_best for entry in (output.prompt_logprobs or [])[1:]} <= {0, 1}


def test_as_many_logprobs_as_tokens_and_no_more_can_be_had(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logprobs=513 is more than the vocabulary of 512 tokens; use 20"):
        llm.generate([[1]], SamplingParams(logprobs=513), use_tqdm=False)
    [output] = llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=512), use_tqdm=False)
    assert [len(entry) for entry in output.outputs[0].logprobs or []] == [512] * 2


# --- scores ---


def test_a_score_is_the_sum_of_a_completions_logprobs(
    random_checkpoint: Checkpoint, llm: LLM, reference_model: Callable[[Path], torch.nn.Module]
) -> None:
    before, after = prompts(40, 1, 20), prompts(5, 30, 1, seed=1)
    scores = llm.score(before, after, use_tqdm=False)
    for _ in range(2):
        [greedy] = llm.generate(before[:1], GREEDY, use_tqdm=False)
        assert llm.score([before[0]], [greedy.token_ids], use_tqdm=False)[0].is_greedy
    for one, two, score in zip(before, after, scores, strict=True):
        expected = reference_logprobs(reference_model(random_checkpoint()), one + two)[len(one) - 1 :]
        assert score.token_ids == two
        assert score.logprobs == pytest.approx(expected[range(len(two)), two].tolist(), abs=1e-3)
        assert score.total == pytest.approx(sum(score.logprobs))
        assert score.is_greedy == (expected.argmax(dim=1).tolist() == two)


def test_what_could_not_be_scored_is_not_a_number_and_not_greedy(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [[1, 2], [3]], [[4, 5], [6, 7]]
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=1) as llm:
        wanted = llm.score(*pairs, use_tqdm=False)
        step = llm.engine.step

        def abort_first() -> list[RequestOutput]:
            llm.abort(2)  # the third request of this engine
            return step()

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", abort_first)
            aborted, scored = llm.score(*pairs, use_tqdm=False)
        assert scored == wanted[1], "the other one"
        assert isinstance(llm.engine.runner, DeviceRunner)
        with torch.inference_mode():
            llm.engine.runner.model.model.norm.weight.fill_(math.nan)
        llm.reset_prefix_cache()
        [broken] = llm.score([[1, 2]], [[4, 5]], use_tqdm=False)
    for score in (aborted, broken):
        assert score.token_ids == [4, 5]
        assert len(score.logprobs) == 2
        assert all(map(math.isnan, [*score.logprobs, score.total]))
        assert not score.is_greedy


def test_answers_to_one_question_share_its_computation(llm: LLM) -> None:
    [question], answers = prompts(100), prompts(4, 6, 9, 2, seed=1)
    llm.reset_prefix_cache()
    computed_before = llm.engine.stats.prefill_tokens
    together = llm.score([question] * 4, answers, use_tqdm=False)
    assert llm.engine.stats.prefill_tokens - computed_before == 4 * 100 + 21 - 3 * 96
    alone = [llm.score([question], [answer], use_tqdm=False)[0] for answer in answers]
    assert [score.token_ids for score in together] == [score.token_ids for score in alone] == answers
    for one, two in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-3)


def test_texts_are_scored_as_the_model_would_read_them(tiny: LLM) -> None:
    for prompt, completion in [(QUESTION, "4"), ("What is", " 12 + 3?"), ("Count, spel", "l")]:
        [score] = tiny.score(prompt, completion, use_tqdm=False)
        whole = tiny.encode(prompt + completion)
        assert score.token_ids == whole[-len(score.token_ids) :]
        assert len(score.token_ids) < len(whole)
    assert tiny.decode(score.token_ids) == " spell", "one token, across the border"
    [apart] = tiny.score("spel", "l", use_tqdm=False)
    assert tiny.encode("spell") != tiny.encode("spel") + apart.token_ids, "nothing would be left before it"
    [mixed] = tiny.score([tiny.encode("Sort")], " 4", use_tqdm=False)
    assert apart.token_ids + mixed.token_ids == tiny.encode("l") + tiny.encode(" 4")
    [answer] = tiny.generate(QUESTION, SamplingParams(temperature=0), use_tqdm=False)
    assert tiny.score(QUESTION, f"{answer.text}<|im_end|>", use_tqdm=False)[0].is_greedy
    assert not tiny.score(QUESTION, f"{answer.text}7<|im_end|>", use_tqdm=False)[0].is_greedy
    assert tiny.score([], [], use_tqdm=False) == []
    assert Score([1], [-0.5], -0.5, True) == Score([1], [-0.5], -0.5, True)


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        (["a", "b"], ["c"], "1 completions for 2 prompts; give one for each"),
        ("a", "", "completion 0 is empty"),
        ("", "a", "prompt 0 is empty"),
        (["a"], [[]], "completion 0 is empty"),
        (["a"], [[99999]], "completion 0 has token id 99999, outside the vocabulary"),
        ([[1] * 500], [[1] * 20], "prompt 0 has 520 tokens, and with one more exceeds max_model_len=512"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_refused(tiny: LLM, prompt: object, completion: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.score(prompt, completion, use_tqdm=False)  # type: ignore[arg-type]
    assert tiny.is_finished()
