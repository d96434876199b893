"""Times nanoinfer and plain transformers on a CPU, in turns in one process: greedy decoding of random tokens.

    python tests/real/beside_transformers.py smollm2 --rows 1 8 32
    python tests/real/beside_transformers.py smollm2 --rows 32 --mixed
    python tests/real/beside_transformers.py smollm2 --rows 1 --prompt 500 --new 1

It prints medians of seconds by the clock. `make_smollm2.py` writes the folder smollm2; any other of a decoder will do.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from nanoinfer import LLM, SamplingParams

Answers = Callable[[], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a decoder")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="prompts of a call")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--mixed", action="store_true", help="a quarter to twice as many tokens, at random")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    for dtype in args.dtype:
        theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
        with LLM(args.model, dtype=dtype, device="cpu", max_num_seqs=max(args.rows)) as llm:
            for num_rows in args.rows:
                input_lens, output_lens = ([length] * num_rows for length in (args.prompt, args.new))
                generator = torch.Generator().manual_seed(num_rows)
                if args.mixed:
                    input_lens, output_lens = (
                        torch.randint(length // 4, length * 2, (num_rows,), generator=generator).tolist()
                        for length in (args.prompt, args.new)
                    )
                prompts = [torch.randint(3, 49_000, (length,), generator=generator).tolist() for length in input_lens]
                calls = ours_of(llm, prompts, output_lens), theirs_of(theirs, prompts, max(output_lens))
                print(f"{dtype}, {num_rows} rows{', mixed' if args.mixed else ''}: {compare(*calls, args.turns)}")


def ours_of(llm: LLM, prompts: list[list[int]], output_lens: list[int]) -> Answers:
    """Return a call of nanoinfer, which finds no prompt cached."""

    def run() -> list[list[int]]:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in output_lens]
        return [[*output.token_ids] for output in llm.generate(prompts, params, use_tqdm=False)]

    return run


def theirs_of(model: torch.nn.Module, prompts: list[list[int]], output_len: int) -> Answers:
    """Return a call of transformers, whose batch is padded on the left, and ends with its longest answer."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False, "pad_token_id": 0}

    @torch.inference_mode()
    def run() -> list[list[int]]:
        out: torch.Tensor = model.generate(token_ids, attention_mask=mask, **options)  # type: ignore[operator]
        return out[:, width:].tolist()

    return run


def compare(ours: Answers, theirs: Answers, num_turns: int) -> str:
    """Run both in turns after a first time, and describe what they took."""
    answers = [*zip(ours(), theirs(), strict=True)]
    num_equal = sum(mine == other[: len(mine)] for mine, other in answers)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_turns):
        for run, seconds in zip((ours, theirs), times, strict=True):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
    mine, other = map(statistics.median, times)
    speed = sum(len(mine) for mine, _ in answers) / mine
    return (
        f"{other / mine:.2f} times as fast ({mine:.3f} s against {other:.3f}), {speed:.0f} tokens/s, "
        f"{num_equal} of {len(answers)} answers equal"
    )


if __name__ == "__main__":
    main()
