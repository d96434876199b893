"""Counts tokens a step where a model rewrites paragraphs of a text, greedily and one after the other.

    python tests/real/rewriting.py smollm2 docs/design.md
    python tests/real/rewriting.py smollm2 docs/design.md --system "You copy the text, and correct its grammar."

Without proposals a step makes one token. `make_smollm2.py` writes the folder smollm2; any chat model's will do.
"""

import argparse
import re
import time
from pathlib import Path
from typing import Any

from nanoinfer import LLM, SamplingParams

SYSTEM = (
    "You're an AI assistant for text re-writing. Rewrite the input text to make it more professional and formal while "
    "retaining its essential content."
)
METHODS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a chat model")
    parser.add_argument("text", type=Path, help="paragraphs of 400 to 900 characters are rewritten")
    parser.add_argument("--system", default=SYSTEM, help="the system message")
    parser.add_argument("--paragraphs", type=int, default=6)
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    paragraphs = [one for one in re.split(r"\n\s*\n", args.text.read_text()) if 400 <= len(one) <= 900]
    system = {"role": "system", "content": args.system}
    questions = [[system, {"role": "user", "content": one}] for one in paragraphs[: args.paragraphs]]
    params = SamplingParams(temperature=0, max_tokens=args.new)
    answers: dict[str, list[str]] = {}
    for name, config in METHODS.items():
        with LLM(args.model, device="cpu", dtype=args.dtype, max_model_len=1024, speculative_config=config) as llm:
            started = time.perf_counter()
            outputs = [llm.chat(question, params, use_tqdm=False)[0] for question in questions]
            seconds = time.perf_counter() - started
            metrics = llm.get_metrics()
        answers[name] = [output.text for output in outputs]
        num_tokens = metrics.decode_tokens / metrics.num_decode_steps
        print(
            f"{name}: {metrics.num_generated_tokens} tokens, {num_tokens:.2f} of a decode step, {seconds:.0f} s; "
            f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} proposed tokens were right; "
            f"answers {'equal' if answers[name] == answers['without'] else 'differ'}"
        )
    print(f"the first of {len(questions)} answers: {answers['without'][0]}")


if __name__ == "__main__":
    main()
