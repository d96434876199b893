"""Runs in a process of `nanoinfer bench start` or `turns`: a script that imports the nanoinfer of its folder.

It reads a task from each line of its standard input, and answers with a line: loads an engine, or runs a workload. It
uses only what all versions of nanoinfer have, and imports nothing that a user's script would not.
"""

import json
import logging
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints, or a library or process of it, is no answer
    llm: Any = None
    for line in sys.stdin:
        task = json.loads(line)
        if "model" in task:
            llm, answer = load(**task)
        else:
            workload = json.loads(Path(task.pop("workload")).read_text())
            llm.reset_prefix_cache()
            answer = {"seconds": run(llm, workload, task)}
        print(json.dumps(answer), file=answers, flush=True)


def load(model: str, options: dict[str, Any], max_tokens: int) -> tuple[Any, dict[str, Any]]:
    """Load an engine, have it generate so many tokens, and return it and what there is to tell.

    imported: the file of the package. num_blocks: of the KV cache; None where the version does not tell. first_token:
    when generate returned (time.time). parts: the seconds of each part of loading that the log names. compiled: of each
    kernel that was compiled, how often and in how many seconds.
    """
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nanoinfer")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    if logging.lastResort is not None:
        logger.addHandler(logging.lastResort)  # prints warnings, as without a handler

    from nanoinfer import LLM

    kernels, seconds = count_compilations()
    llm = LLM(model, **options)
    run(llm, {"prompts": [[*range(8)]], "max_tokens": [max_tokens]}, {})
    first_token = time.time()
    metrics = getattr(llm, "get_metrics", lambda: None)()  # older versions have no such method or field
    parts = re.findall(r"([a-z-]+) ([0-9.]+) s[,)]", "".join(line for line in log if "ready in" in line))
    return llm, {
        "imported": str(Path(str(sys.modules["nanoinfer"].__file__)).resolve()),
        "num_blocks": getattr(metrics, "num_blocks", None),
        "first_token": first_token,
        "parts": {name: float(number) for name, number in parts},
        "compiled": {name: [count, seconds[name]] for name, count in kernels.most_common()},
    }


def count_compilations() -> tuple[Counter[str], Counter[str]]:
    """Return how often each kernel is compiled from now on, by name, and in how many seconds; nothing on a CPU."""
    import torch

    kernels: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    if torch.cuda.is_available():
        import triton

        def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                kernels[src.name] += 1
                seconds[src.name] += times.total / 1e6

        triton.knobs.compilation.listener = note
    return kernels, seconds


def run(llm: Any, workload: dict[str, Any], options: dict[str, Any]) -> float:
    """Return the seconds that the requests of a workload take. options: of their SamplingParams."""
    from nanoinfer import SamplingParams

    prompts, answers = workload["prompts"], workload.get("answers")
    if answers:
        pairs = [(prompt, answer) for prompt, its in zip(prompts, answers, strict=True) for answer in its]
        started = time.perf_counter()
        llm.score([prompt for prompt, _ in pairs], [answer for _, answer in pairs], use_tqdm=False)
        return time.perf_counter() - started
    options = {**options, "n": workload.get("num_samples", 1), "temperature": 0.6, "ignore_eos": True}
    if workload.get("prompt_logprobs") is not None:
        options |= {"prompt_logprobs": workload["prompt_logprobs"], "detokenize": workload["detokenize"]}
    params = [SamplingParams(max_tokens=count, **options) for count in workload["max_tokens"]]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
