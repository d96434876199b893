"""What a process of `nanoinfer bench turns` runs: a script that any version's `nanoinfer` can be imported under.

It reads a task from each line of its standard input, and answers with a line: loads an engine, or runs a workload. It
may use what all versions have alone.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints, or a library or process of it, is no answer
    llm: Any = None
    for line in sys.stdin:
        task = json.loads(line)
        if "model" in task:
            from nanoinfer import LLM

            llm = LLM(task["model"], **task["options"])
            run(llm, {"prompts": [[*range(8)]], "max_tokens": [16]}, {})  # warms up
            answer: dict[str, Any] = {"imported": str(Path(str(sys.modules["nanoinfer"].__file__)).resolve())}
            metrics = getattr(llm, "get_metrics", lambda: None)()  # older versions have no such method or field
            answer["num_blocks"] = getattr(metrics, "num_blocks", None)
        else:
            workload = json.loads(Path(task.pop("workload")).read_text())
            llm.reset_prefix_cache()
            answer = {"seconds": run(llm, workload, task)}
        print(json.dumps(answer), file=answers, flush=True)


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
