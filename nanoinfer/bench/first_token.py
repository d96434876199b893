"""Start an engine as a user's script does, answer one prompt with one token, and print what that took, as JSON.

`nanoinfer bench start` runs this in fresh processes, so it imports nothing that a user's script would not.
"""

import json
import logging
import re
import sys
import time
from collections import Counter
from typing import Any


def main(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return when the token came (time.time), the seconds of each part that the log names, and what was compiled."""
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nanoinfer").addHandler(handler)
    logging.getLogger("nanoinfer").setLevel(logging.INFO)

    from nanoinfer import LLM, SamplingParams

    kernels, seconds = count_compilations()
    with LLM(folder, **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        first_token = time.time()
    [ready] = [line for line in log if "ready in" in line]
    parts = {name: float(number) for name, number in re.findall(r"([a-z-]+) ([0-9.]+) s[,)]", ready)}
    compiled = {name: [count, seconds[name]] for name, count in kernels.most_common()}
    return {"first_token": first_token, "parts": parts, "compiled": compiled}


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


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
