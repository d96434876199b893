"""Runs `nanoinfer run-batch --dry-run`: finds what a job has to do, as the job would, but without weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from nanoinfer.batch.batch_job import Job, check_input
from nanoinfer.batch.job_files import Line, read_lines
from nanoinfer.config import EngineConfig

BAR_WIDTH = 40  # characters of the longest bar


@dataclass(slots=True)
class JobSize:
    """Says what a job has to do."""

    num_lines: int = 0
    num_errors: int = 0  # lines that are no requests, or cannot be served
    most_generated: int = 0  # tokens of all answers, if each is as long as it may be
    lengths: Counter[int] = field(default_factory=Counter)  # how many prompts have so many tokens

    def __str__(self) -> str:
        num_prompts, num_tokens = self.lengths.total(), sum(length * num for length, num in self.lengths.items())
        lines = [f"{self.num_lines} lines, {self.num_errors} with errors"]
        if num_prompts:
            lines.append(
                f"{num_prompts} prompts with {num_tokens} tokens: {min(self.lengths)} to {max(self.lengths)}, "
                f"{num_tokens / num_prompts:.0f} on average; at most {self.most_generated} tokens to generate"
            )
            lines.append(f"{'tokens up to':>12}{'prompts':>10}{'tokens':>14}")
        prompts, tokens = Counter[int](), Counter[int]()  # by the next power of two
        for length, num in self.lengths.items():
            bound = 1 << (length - 1).bit_length()
            prompts[bound] += num
            tokens[bound] += length * num
        for bound in sorted(prompts):
            bar = "#" * round(BAR_WIDTH * prompts[bound] / max(prompts.values()))
            lines.append(f"{bound:>12}{prompts[bound]:>10}{tokens[bound]:>14}  {bar}".rstrip())
        return "\n".join(lines)


class PrintedErrors:
    """Stands in for the output of a job: prints the error of each line that has one."""

    def write(self, line: Line, record: dict[str, Any]) -> None:
        print(f"line {line.number}: {record['error']['message']}")


def dry_run(
    config: EngineConfig,
    input_path: Path,
    *,
    loras: Mapping[str, str] | None = None,
    overrides: dict[str, Any] | None = None,
    system: str | None = None,
    limit: int | None = None,
) -> JobSize:
    """Print what is wrong with lines of the input, as the job would write it, and return what it has to do.

    The arguments are those of `run_batch`. A prompt may be as long as max_model_len, or the model's own limit; if a
    GPU has less memory than that takes, the job may find more lines that are too long. Raises JobError where the input
    cannot be used, and what finding the model raises.
    """
    check_input(input_path, overrides or {}, limit)
    job, max_model_len = make_job(config, overrides or {}, system, loras)
    size = JobSize()
    for line in islice(read_lines(input_path, {}), limit):
        size.num_lines += 1
        question = job.read(line)
        requests = job.prepare(question) if question is not None else []
        size.num_errors += not requests
        for request in requests:
            length, params = len(request.token_ids), request.sampling_params
            size.lengths[length] += 1
            if question is not None and "input" not in question.body:
                room = max_model_len - length
                size.most_generated += params.n * (room if params.max_tokens is None else min(params.max_tokens, room))
    return size


def make_job(
    config: EngineConfig, overrides: dict[str, Any], system: str | None, loras: Mapping[str, str] | None = None
) -> tuple[Job, int]:
    """Return a job that can read lines and prepare their requests, but run none, and its max_model_len."""
    from nanoinfer.constraints.constraints import Constraints  # which imports PyTorch with the others
    from nanoinfer.engine.preparer import Preparer
    from nanoinfer.loading import find_model
    from nanoinfer.pooling_calls.calls import PoolingCalls

    files = replace(find_model(replace(config, load_format="dummy")), config=config)  # no weights are downloaded
    model_config, tokenizer = files.model_config, files.load_tokenizer()
    max_model_len = model_config.longest_sequence(config.max_model_len)
    image_reader = files.make_image_reader(tokenizer, files.load_image_processor(tokenizer))
    processor = files.make_prompt_processor(tokenizer, max_model_len, image_reader)
    constraints = files.make_constraints(Constraints, tokenizer, processor)
    engine: Any = SimpleNamespace(config=config, check_open=lambda: None)
    queue: Any = SimpleNamespace(engine=engine, capacity=0)
    preparer = Preparer(engine, processor, constraints)
    preparer.adapters_of = lambda _, count: [None] * count  # which are not loaded
    pooling_calls = PoolingCalls(queue, preparer, model_config, config, max_model_len, None)
    llm: Any = SimpleNamespace(queue=queue, preparer=preparer, pooling_calls=pooling_calls, config=config)
    base = replace(files.default_sampling_params(), **overrides)
    return Job(llm, cast("Any", PrintedErrors()), base, float("inf"), system, loras), max_model_len
