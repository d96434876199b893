"""Ask a model a few questions. Without arguments: the tiny checkpoint that comes with nanoinfer, on any machine.

python example.py [--model FOLDER_OR_HUB_ID] [--tensor-parallel-size N] [--prompt TEXT ...]
"""

import argparse
import logging
import sys

from nanoinfer import LLM, NanoinferError, SamplingParams

PROMPTS = ["introduce yourself", "list all prime numbers within 100"]
TINY_PROMPTS = ["What is 312 + 48?", "Sort 31, 4, 15, 9.", "Spell river backwards."]


def as_chat(llm: LLM, question: str) -> str:
    """Return the prompt of a conversation that begins with this question, in the model's own format."""
    messages = [{"role": "user", "content": question}]
    return llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a local folder or a hub id, such as Qwen/Qwen3-0.6B (tiny)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--prompt", nargs="+", metavar="TEXT", help="questions to ask instead")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanoinfer").setLevel(logging.INFO)  # one line about the loaded model

    is_tiny = args.model == "tiny"
    prompts = args.prompt or PROMPTS + TINY_PROMPTS * is_tiny
    # The tiny model knows one right answer to each of its questions: greedy decoding gives it.
    sampling_params = SamplingParams(temperature=0 if is_tiny else 0.6, max_tokens=256)
    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size) as llm:
        outputs = llm.generate([as_chat(llm, prompt) for prompt in prompts], sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {prompt}\n{output.text}")


if __name__ == "__main__":
    try:
        main()
    except NanoinferError as error:
        sys.exit(f"example.py: {error}")
