"""`nanoinfer bench rewriting`: what proposals gain on texts that repeat themselves, and what they cost on others.

Random weights repeat nothing of their own. So the texts are made up, and the tokens that a step draws are replaced by
theirs before it finds out which proposals are right. All work of a step is done as if the model had drawn them. One
engine answers in turns with its proposer and without.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench.report import describe_machine, find_device, print_row
from nanoinfer.bench.workloads import model_of
from nanoinfer.engine.interfaces import Listener
from nanoinfer.engine.scheduled_batch import ScheduledBatch

COPIED, NEW = 24, 6  # tokens of a span of a rewritten text, on average
SIZES = {"cuda": (500, 512), "cpu": (100, 96)}  # tokens of a prompt, and of an answer
ROWS = {"cuda": (1, 16, 256), "cpu": (1, 4)}
NUM_RUNS = 3


class Request(NamedTuple):
    prompt: list[int]
    answer: list[int]


Text = Callable[[random.Random, list[int], int], Iterator[int]]


def rewritten(rng: random.Random, prompt: list[int], vocab_size: int) -> Iterator[int]:
    """Yield spans of the prompt, in its order, and new ones in place of what is left out between them."""
    place = 0
    while True:
        for _ in range(_span(rng, COPIED)):
            yield prompt[place % len(prompt)]
            place += 1
        for _ in range(_span(rng, NEW)):
            yield rng.randrange(vocab_size)
        place += _span(rng, NEW)


def with_every_fifth_new(rng: random.Random, prompt: list[int], vocab_size: int) -> Iterator[int]:
    """Yield the prompt with every fifth token replaced."""
    while True:
        for place, token_id in enumerate(prompt):
            yield token_id if place % 5 < 4 else rng.randrange(vocab_size)


def at_random(rng: random.Random, _prompt: list[int], vocab_size: int) -> Iterator[int]:
    """Yield tokens that repeat nothing."""
    while True:
        yield rng.randrange(vocab_size)


TEXTS: dict[str, Text] = {"rewriting": rewritten, "every fifth token new": with_every_fifth_new, "random": at_random}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time every kind of text with and without proposals, print a table, and return all figures."""
    device = find_device()
    prompt_len, answer_len = SIZES[device]
    config = {"method": args.method, "num_speculative_tokens": args.num_speculative_tokens}
    figures = []
    with model_of(args, device) as model:
        options: dict[str, Any] = {**model.options, "device": device, "max_num_seqs": max(ROWS[device])}
        options |= {"max_model_len": prompt_len + answer_len, "enable_prefix_caching": False}
        options["num_kvcache_blocks"] = 16 if device == "cpu" else None
        with LLM(str(model.folder), speculative_config=config, **options) as llm:
            forced = ForcedTexts(llm)
            print(f"{llm!r}: output tokens a second, median of {NUM_RUNS} runs")
            print_row("text", "rows", "without proposals", "with them", "ratio", "tokens a row and step", "accepted")
            print_row(*["---"] * 7)
            for name, text in TEXTS.items():
                for num_rows in ROWS[device]:
                    rng = random.Random(args.seed)

                    def draw(rng: random.Random = rng, text: Text = text, num_rows: int = num_rows) -> list[Request]:
                        """Draw requests, which are new in each run: "suffix" would know the answers of old ones."""
                        size = model.config.vocab_size
                        prompts = [[rng.randrange(size) for _ in range(prompt_len)] for _ in range(num_rows)]
                        return [Request(prompt, [*islice(text(rng, prompt, size), answer_len)]) for prompt in prompts]

                    figures.append({"text": name, "num_rows": num_rows, **compare(llm, forced, draw)})
                    print_figures(figures[-1])
    return {"model": str(model), "config": config, "texts": figures, **describe_machine(device)}


def compare(llm: LLM, forced: "ForcedTexts", draw: Callable[[], list["Request"]]) -> dict[str, Any]:
    """Answer requests in turns with and without proposals; return seconds of decode steps, and counts."""
    engine: Any = llm.engine
    proposer, seconds = engine.proposer, {True: list[float](), False: list[float]()}
    before, num_tokens = llm.get_metrics(), 0
    for _ in range(1 + NUM_RUNS):  # the first ones compile, capture graphs, and measure steps
        requests = draw()
        num_tokens = sum(len(request.answer) for request in requests)
        for has_proposals in (False, True):
            engine.proposer = proposer if has_proposals else None
            seconds[has_proposals].append(forced.answer(requests))
    engine.proposer = proposer
    after = llm.get_metrics()
    speeds = {has: num_tokens / statistics.median(its[1:]) for has, its in seconds.items()}
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    num_plain = (1 + NUM_RUNS) * num_tokens - num_accepted  # tokens of rows with proposals, one for each step
    return {
        "with": speeds[True],
        "without": speeds[False],
        "seconds": {"with": seconds[True], "without": seconds[False]},
        "tokens_a_step": (1 + NUM_RUNS) * num_tokens / num_plain,
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
    }


def print_figures(one: dict[str, Any]) -> None:
    share = f"{one['num_accepted_tokens'] / one['num_draft_tokens']:.0%}" if one["num_draft_tokens"] else ""
    speeds = f"{one['without']:,.0f}", f"{one['with']:,.0f}", f"{one['with'] / one['without']:.3f}"
    print_row(one["text"], one["num_rows"], *speeds, f"{one['tokens_a_step']:.2f}", share)


class ForcedTexts(Listener):
    """Has an engine of one rank answer what it is told to."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = cast(Any, llm.engine)
        self._sampler: Any = self._engine.runner.model_runner.state.sampler
        self._texts = torch.zeros_like(self._sampler.token_ids)  # (rows, max_tokens): what each row is to say
        self._by_request: dict[int, list[int]] = {}
        draws = self._sampler._draws
        self._draw, draws.from_logits = draws.from_logits, self._from_logits

    def answer(self, requests: list["Request"]) -> float:
        """Answer requests so; return the seconds that it took from their first decode step on."""
        self._by_request = {}
        for prompt, answer in requests:
            params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True, detokenize=False)
            self._by_request[self._llm.add_request(prompt, params)] = prompt + answer
        self._engine.scheduler.listener = self
        outputs, num_steps = [], self._llm.get_metrics().num_decode_steps
        while self._llm.get_metrics().num_decode_steps == num_steps:
            outputs += self._llm.step()
        started = perf_counter()
        while not self._llm.is_finished():
            outputs += self._llm.step()
        seconds = perf_counter() - started
        for output in outputs:
            whole = output.prompt_token_ids + output.token_ids
            assert whole == self._by_request[output.request_id], "a row has said something else"
        return seconds

    def launching(self, batch: ScheduledBatch, started: float) -> None:
        for seq in batch.admitted:
            text = self._by_request[seq.request_id]
            self._texts[seq.held_row, : len(text)] = torch.tensor(text, dtype=torch.int32).to(self._texts.device)

    def _from_logits(self, logits: Tensor, lowest: Tensor | None, lines: Any) -> Tensor:
        """Draw as ever, and return what the rows are to say instead."""
        drawn, sampler = self._draw(logits, lowest, lines), self._sampler
        if lines.tables is not None:
            positions = lines.tables.positions.long().clamp(max=self._texts.shape[1] - 1)
            return torch.where(lines.tables.rows >= 0, self._texts[lines.rows, positions], -1)
        positions = sampler.context_lens[lines.rows].long() - 1  # the draw has entered a token there
        sampler.token_ids[lines.rows, positions] = forced = self._texts[lines.rows, positions]
        return torch.where(lines.rows >= 0, forced, drawn)


def _span(rng: random.Random, mean: int) -> int:
    """Draw a length of at least 1 from the geometric distribution of this mean."""
    length = 1
    while rng.random() > 1 / mean:
        length += 1
    return length
