"""`nanoinfer bench rewriting`: what proposals gain on texts that repeat themselves, and what they cost on others.

Random weights repeat nothing of their own. So the texts are made up, and the tokens that a step draws are replaced by
theirs before it finds out which proposals are right. All work of a step is done as if the model had drawn them. One
engine answers in turns with its proposer and without.

Objects of JSON follow a form only with proposals. Without, the same tokens are plain text: forms are to be faster than
that. The last job is a benchmark of random texts whose last requests are long rewriting. They run on when all others
have ended, so the last quarter of its tokens is timed by itself.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.bench.report import describe_machine, find_device, print_row, print_title
from nanoinfer.bench.workloads import JSON, model_of
from nanoinfer.device import import_error
from nanoinfer.engine.interfaces import Listener
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.errors import ConfigError

COPIED, NEW = 24, 6  # tokens of a span of a rewritten text, on average
SIZES = {"cuda": (500, 384), "cpu": (100, 96)}  # tokens of a prompt, and of an answer
# How many requests of each text run at once.
ROWS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"rewriting": (1, 16, 256), "every fifth token new": (1,), "random": (1, 16, 256), "JSON": (1, 64)},
    "cpu": {"rewriting": (1, 4), "every fifth token new": (1, 4), "random": (1, 4), "JSON": (1, 4)},
}
TAILS = {"cuda": (128, 8, 1536), "cpu": (8, 2, 192)}  # requests of the last job, how many rewrite, and their tokens
WARM_UP = 6  # the first requests of a job are so many times shorter
NUM_RUNS = 3
JOB_SECONDS = 5.0  # after which a job begins no further run


class Request(NamedTuple):
    prompt: list[int]
    answer: list[int]
    form: StructuredOutputsParams | None = None  # that the answer follows


class Run(NamedTuple):
    """Holds output tokens a second: of a whole run, and of the last quarter of its tokens."""

    speed: float
    last_quarter: float


class Mark(NamedTuple):
    """Says when an engine has made so many tokens."""

    time: float  # perf_counter
    num_tokens: int


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


Draw = Callable[..., list[Request]]  # `draw_job` for one line of the table; what it draws is new each time
TEXTS: dict[str, Text] = {"rewriting": rewritten, "every fifth token new": with_every_fifth_new, "random": at_random}


def draw_requests(
    rng: random.Random, vocab_size: int, text: Text, num_requests: int, lens: tuple[int, int]
) -> list[Request]:
    """Return requests of one kind of text. lens: tokens of a prompt, and of an answer."""
    prompts = [[rng.randrange(vocab_size) for _ in range(lens[0])] for _ in range(num_requests)]
    return [Request(prompt, [*islice(text(rng, prompt, vocab_size), lens[1])]) for prompt in prompts]


def draw_objects(rng: random.Random, llm: LLM, vocab_size: int, num_requests: int, prompt_len: int) -> list[Request]:
    """Return requests for JSON of many fields, as a model writes it."""
    form = StructuredOutputsParams(**JSON)
    requests = []
    for _ in range(num_requests):
        answer = llm.tokenizer.encode(json.dumps(draw_object(rng)), add_special_tokens=False)
        requests.append(Request([rng.randrange(vocab_size) for _ in range(prompt_len)], answer, form))
    return requests


def draw_object(rng: random.Random) -> dict[str, Any]:
    """Return an object that the schema of `JSON` allows."""
    values: dict[str, Any] = {}
    for name, kind in JSON["json"]["properties"].items():
        if "enum" in kind:
            values[name] = rng.choice(kind["enum"])
        elif kind["type"] == "integer":
            values[name] = rng.randrange(10_000)
        else:
            values[name] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, kind["maxLength"])))
    return values


def draw_tail(rng: random.Random, vocab_size: int, tail: tuple[int, int, int], lens: tuple[int, int]) -> list[Request]:
    """Return requests of random texts and lengths, and at last a few that rewrite. tail: as in TAILS."""
    num_requests, num_rewriting, answer_len = tail
    requests = []
    for _ in range(num_requests - num_rewriting):
        some = rng.randint(lens[0] // 5, 2 * lens[0]), rng.randint(lens[1] // 5, 2 * lens[1])
        requests += draw_requests(rng, vocab_size, at_random, 1, some)
    return requests + draw_requests(rng, vocab_size, rewritten, num_rewriting, (lens[0], answer_len))


def draw_job(
    name: str, num_requests: int, device: str, rng: random.Random, llm: LLM, vocab_size: int, shorter: int = 1
) -> list[Request]:
    """Return the requests of a line of the table. shorter: how many times shorter than usual they are."""
    (prompt_len, answer_len), (_, num_rewriting, tail_len) = SIZES[device], TAILS[device]
    lens = prompt_len // shorter, answer_len // shorter
    if name == "JSON":
        return draw_objects(rng, llm, vocab_size, num_requests, lens[0])
    if name in TEXTS:
        return draw_requests(rng, vocab_size, TEXTS[name], num_requests, lens)
    return draw_tail(rng, vocab_size, (num_requests, num_rewriting, tail_len // shorter), lens)


def jobs_of(device: str, only: str | None, requests: list[int] | None) -> list[tuple[str, int]]:
    """Return the lines of the table: texts, and how many requests of them. Raises ConfigError where none is left."""
    jobs = [(name, num_requests) for name, its in ROWS[device].items() for num_requests in its]
    jobs.append(("random, the last ones rewriting", TAILS[device][0]))
    wanted = [job for job in jobs if (only or "") in job[0] and (requests is None or job[1] in requests)]
    if not wanted:
        raise ConfigError(f"--only {only!r} and --requests {requests} leave none of {jobs}; leave one of them out")
    return wanted


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time every kind of text with and without proposals, print a table, and return all figures."""
    device = find_device()
    lens, tail = SIZES[device], TAILS[device]
    config = {"method": args.method, "num_speculative_tokens": args.num_speculative_tokens}
    figures = []
    with model_of(args, device) as model:
        jobs = jobs_of(device, args.only, args.requests)
        most = max(num_requests for _, num_requests in jobs)
        options: dict[str, Any] = {**model.options, "device": device, "max_num_seqs": most}
        options |= {"max_model_len": lens[0] + max(1024, 2 * lens[1], tail[2]), "enable_prefix_caching": False}
        options["num_kvcache_blocks"] = 64 if device == "cpu" else None
        vocab_size = model.config.vocab_size
        with LLM(str(model.folder), speculative_config=config, **options) as llm:
            forced = ForcedTexts(llm)
            print(f"{llm!r}: output tokens a second, median of up to {NUM_RUNS} runs")
            columns = "text", "requests", "without proposals", "with them", "ratio", "ratio of the last quarter"
            print_title(*columns, "tokens a row and step", "accepted")
            for name, num_requests in jobs:
                if name == "JSON" and import_error("llguidance") is not None:
                    print_row(name, num_requests, *["needs llguidance"] * 6)
                    continue
                rng = random.Random(f"{args.seed} {name} {num_requests}")  # no text is that of an earlier job
                draw = partial(draw_job, name, num_requests, device, rng, llm, vocab_size)
                figures.append({"text": name, "num_requests": num_requests, **compare(llm, forced, draw)})
                print_figures(figures[-1])
    return {"model": str(model), "config": config, "texts": figures, **describe_machine(device)}


def compare(llm: LLM, forced: "ForcedTexts", draw: Draw) -> dict[str, Any]:
    """Answer requests in turns with and without proposals; return the speeds of decode steps, and counts.

    draw: returns requests, which are new in each run: "suffix" would know the answers of old ones.
    """
    engine: Any = llm.engine
    proposer, runs = engine.proposer, {True: list[Run](), False: list[Run]()}
    started, num_tokens, before = perf_counter(), 0, llm.get_metrics()
    for count in range(1 + NUM_RUNS):
        requests = draw(shorter=1 if count else WARM_UP)  # the first ones compile, capture graphs, and measure steps
        if count == 1:
            started, num_tokens, before = perf_counter(), 0, llm.get_metrics()
        num_tokens += sum(len(request.answer) for request in requests)
        for has_proposals in (False, True):
            engine.proposer = proposer if has_proposals else None
            runs[has_proposals].append(forced.answer(requests, follows_forms=has_proposals))
        if count and perf_counter() - started > JOB_SECONDS:
            break
    engine.proposer = proposer
    after = llm.get_metrics()
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    medians = {has: [statistics.median(column) for column in zip(*its[1:], strict=True)] for has, its in runs.items()}
    return {
        "with": medians[True][0],
        "without": medians[False][0],
        "last_quarter": {"with": medians[True][1], "without": medians[False][1]},
        "runs": {"with": runs[True], "without": runs[False]},
        "tokens_a_step": num_tokens / (num_tokens - num_accepted),
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
    }


def print_figures(one: dict[str, Any]) -> None:
    share = f"{one['num_accepted_tokens'] / one['num_draft_tokens']:.0%}" if one["num_draft_tokens"] else ""
    ratios = [f"{its['with'] / its['without']:.3f}" for its in (one, one["last_quarter"])]
    speeds = f"{one['without']:,.0f}", f"{one['with']:,.0f}", *ratios
    print_row(one["text"], one["num_requests"], *speeds, f"{one['tokens_a_step']:.2f}", share)


def _speed(first: Mark, last: Mark) -> float:
    return (last.num_tokens - first.num_tokens) / (last.time - first.time)


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

    def answer(self, requests: list[Request], follows_forms: bool) -> Run:
        """Answer requests so, and return the speeds from their first decode step on."""
        self._by_request = {}
        for prompt, answer, form in requests:
            params = SamplingParams(
                temperature=0,
                max_tokens=len(answer),
                ignore_eos=True,
                detokenize=False,
                structured_outputs=form if follows_forms else None,
            )
            self._by_request[self._llm.add_request(prompt, params)] = prompt + answer
        self._engine.scheduler.listener = self
        outputs, num_steps = [], self._llm.get_metrics().num_decode_steps
        while self._llm.get_metrics().num_decode_steps == num_steps:
            outputs += self._llm.step()
        marks = [self._mark()]
        while not self._llm.is_finished():
            outputs += self._llm.step()
            marks.append(self._mark())
        for output in outputs:
            whole = output.prompt_token_ids + output.token_ids
            assert whole == self._by_request[output.request_id], "a row has said something else"
        first, last = marks[0], marks[-1]
        num_early = 0.75 * (last.num_tokens - first.num_tokens)
        late = [mark for mark in marks if mark.num_tokens - first.num_tokens <= num_early][-1]
        return Run(_speed(first, last), _speed(late, last))

    def _mark(self) -> Mark:
        return Mark(perf_counter(), self._llm.get_metrics().num_generated_tokens)

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
