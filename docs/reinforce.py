"""Teaches the tiny checkpoint to answer a number N with "N - N = 0", by policy gradients, in two minutes on a CPU.

    python docs/reinforce.py [reward.svg]

REINFORCE (Williams 1992): sample answers, reward them, and make those likelier that were better than the other answers
to their prompt. nanoinfer samples, a transformers model is trained, and its weights go to nanoinfer after each step.
"""

import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams, tiny_model_path

PROMPTS_A_STEP, SAMPLES = 16, 8


def reward(number: int, answer: str) -> float:
    """Half for a difference of the number and itself, and half for its result."""
    return 0.5 * answer.startswith(f"{number} - {number} =") + 0.5 * (answer == f"{number} - {number} = 0")


def log_likelihoods(model: torch.nn.Module, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of each answer after its prompt: (num_answers,)."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (num_answers, longest)
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    places = torch.arange(1, ids.shape[1])
    starts, ends = (torch.tensor([*map(len, lists)]).unsqueeze(1) for lists in (prompts, rows))
    return (logprobs * ((places >= starts) & (places < ends))).sum(1)


def train(num_steps: int, seed: int = 0) -> list[float]:
    """Return the mean reward of each step."""
    numbers, history = random.Random(seed), []
    trainer = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-4)
    params = SamplingParams(temperature=1.0, n=SAMPLES, max_tokens=16)
    with LLM(tiny_model_path(), device="cpu", seed=seed) as llm:
        for step in range(num_steps):
            asked = [numbers.randint(1, 999) for _ in range(PROMPTS_A_STEP)]
            texts = [f"<|im_start|>user\n{number}<|im_end|>\n<|im_start|>assistant\n" for number in asked]
            outputs = llm.generate(texts, params, use_tqdm=False)
            pairs = zip(asked, outputs, strict=True)
            rewards = torch.tensor([[reward(n, sample.text) for sample in output.outputs] for n, output in pairs])
            advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
            prompts = [output.prompt_token_ids for output in outputs for _ in output.outputs]
            answers = [sample.token_ids for output in outputs for sample in output.outputs]
            loss = -(advantages * log_likelihoods(trainer, prompts, answers)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            llm.update_weights(trainer.named_parameters())
            history.append(rewards.mean().item())
            print(f"step {step}: reward {history[-1]:.2f}, first answer {outputs[0].text!r}")
    return history


def draw(rewards: list[float], path: Path) -> None:
    """Draw the rewards as an SVG that is legible on white and on dark pages."""
    points = " ".join(f"{40 + 14 * step},{160 - 140 * mean:.1f}" for step, mean in enumerate(rewards))
    ticks = [f'<text x="{38 + 14 * step}" y="180">{step}</text>' for step in range(0, len(rewards), 5)]
    path.write_text(f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200" width="400" height="200">
<title>The mean reward rises to 1</title>
<style>text {{ font: 12px sans-serif; fill: #7d7d7d; }} path, polyline {{ fill: none; stroke: #888; }}</style>
<path d="M40 20V160H390"/><text x="20" y="24">1</text><text x="20" y="164">0</text>{"".join(ticks)}
<text x="44" y="16">mean reward</text><text x="200" y="196">step</text>
<polyline style="stroke: #3f7fb8; stroke-width: 2" points="{points}"/>
</svg>
""")


if __name__ == "__main__":
    history = train(num_steps=25)
    for name in sys.argv[1:]:
        draw(history, Path(name))
