"""Counts tokens a step where a model rewrites paragraphs of a document, greedily and one after the other.

    python tests/real/rewriting.py smollm2 docs/design.md
    python tests/real/rewriting.py smollm2 docs/generate.md --ask "Write this text again in simpler words:"

Without proposals a decode step makes one token. `make_smollm2.py` writes the folder smollm2; any chat model's will do.
"""

import argparse
import re
import statistics
import time
from pathlib import Path
from typing import Any

from nanoinfer import LLM, SamplingParams

METHODS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a chat model")
    parser.add_argument("document", type=Path, help="paragraphs of 300 to 900 characters are rewritten")
    parser.add_argument("--ask", default="Proofread this text, and write it again without mistakes:")
    parser.add_argument("--paragraphs", type=int, default=8)
    parser.add_argument("--new", type=int, default=160, help="tokens of an answer, at most")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    blocks = re.split(r"\n\s*\n", args.document.read_text())
    paragraphs = [" ".join(one.split()) for one in blocks if 300 <= len(one) <= 900 and one[0].isalpha()]
    questions = [[{"role": "user", "content": f"{args.ask}\n\n{one}"}] for one in paragraphs[: args.paragraphs]]
    params = SamplingParams(temperature=0, max_tokens=args.new)
    expected: list[list[int]] = []
    for name, config in METHODS.items():
        answers, steps, started = list[list[int]](), [0], time.perf_counter()
        with LLM(args.model, device="cpu", dtype=args.dtype, max_model_len=1024, speculative_config=config) as llm:
            for question in questions:
                [output] = llm.chat(question, params, use_tqdm=False)
                answers.append(output.token_ids)
                steps.append(llm.get_metrics().num_decode_steps)
                if config is None:
                    print(f"- {output.text}")
            metrics = llm.get_metrics()
        expected = expected or answers
        speeds = [(len(one) - 1) / (end - begin) for one, begin, end in zip(answers, steps, steps[1:], strict=False)]
        print(
            f"{name}: {metrics.num_generated_tokens} tokens in {time.perf_counter() - started:.0f} s; "
            f"{metrics.decode_tokens / steps[-1]:.2f} a decode step, by answer {statistics.median(speeds):.2f} "
            f"({min(speeds):.2f} to {max(speeds):.2f}); {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} "
            f"proposals right; answers {'equal' if answers == expected else 'differ'}"
        )


if __name__ == "__main__":
    main()
