"""Train the bundled tiny Qwen3 checkpoint: its tasks, its tokenizer, its weights and its measured accuracy.

The checkpoint exists so that every test and example can run a real model offline. It has the exact architecture and
chat format of Qwen3, is under 8 MB, and answers a few narrow kinds of question whose answers are checked by arithmetic.

    python -m tests.tiny_checkpoint.train --out DIR --device cuda --seconds 420
    python -m tests.tiny_checkpoint.train --evaluate DIR

The questions come from tasks.py, their chat format and the tokenizer from chat.py. torch and transformers are
imported inside the functions that need them, so that importing this module costs nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tiny_checkpoint.chat import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    VOCAB_SIZE,
    Segment,
    random_system_prompt,
    render,
    train_tokenizer,
    training_conversation,
)
from tests.tiny_checkpoint.tasks import TASKS, held_out_examples

if TYPE_CHECKING:
    import numpy as np
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import Qwen3ForCausalLM

MAX_POSITIONS = 4096


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(folder: Path, seed: int) -> Tokenizer:
    """Write everything but the weights and the card, in the spelling that transformers 4.51 and 5 both read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(seed)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # Qwen's own class would replace the split pattern by its own
        "model_max_length": MAX_POSITIONS,
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE.strip(),
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": im_end,
        "pad_token_id": end_of_text,
        "torch_dtype": "bfloat16",
    }
    generation_config = {
        "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config)
    return tokenizer


# Rows: conversations as fixed-width arrays of token ids, with a flag on each token that the loss counts.

ANSWER_FLAG = 1 << 14
ROW_WIDTHS = (56, 128, 256)
CHUNK_SIZE = 20_000  # conversations a worker makes between two reports


def encode_rows(tokenizer: Tokenizer, conversations: list[list[Segment]]) -> list[np.ndarray]:
    """Return one (num_rows, width) int16 array for each of ROW_WIDTHS; rows end in unflagged END_OF_TEXT."""
    import numpy as np

    segments = [segment for conversation in conversations for segment in conversation]
    texts = [segment.text for segment in segments]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    padding = tokenizer.token_to_id(END_OF_TEXT)
    buckets: list[list[list[int]]] = [[] for _ in ROW_WIDTHS]
    for conversation in conversations:
        row: list[int] = []
        for segment in conversation:
            ids = next(encoded).ids
            row += [token | ANSWER_FLAG for token in ids] if segment.is_answer else ids
        for width, bucket in zip(ROW_WIDTHS, buckets, strict=True):
            if len(row) <= width:
                bucket.append(row + [padding] * (width - len(row)))
                break  # the few rows longer than the last width are left out
    return [
        np.array(bucket, dtype=np.int16).reshape(-1, width) for width, bucket in zip(ROW_WIDTHS, buckets, strict=True)
    ]


def _make_chunk(job: tuple[Path, str]) -> list[np.ndarray]:
    """Generate and encode CHUNK_SIZE conversations in a worker process; the job is (tokenizer file, chunk seed)."""
    from tokenizers import Tokenizer

    tokenizer_file, seed = job
    rng = random.Random(seed)
    conversations = [training_conversation(rng) for _ in range(CHUNK_SIZE)]
    return encode_rows(Tokenizer.from_file(str(tokenizer_file)), conversations)


def make_pools(folder: Path, num_conversations: int, num_workers: int, seed: int, deadline: float) -> list[Tensor]:
    """Make the training rows in worker processes until there are enough or the deadline passes."""
    import numpy as np
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each worker
    jobs = [(folder / "tokenizer.json", f"{seed} {i}") for i in range(math.ceil(num_conversations / CHUNK_SIZE))]
    chunks: list[list[np.ndarray]] = []
    with get_context("spawn").Pool(num_workers) as pool:
        for chunk in pool.imap(_make_chunk, jobs):
            chunks.append(chunk)
            if time.monotonic() > deadline:
                break
    return [torch.from_numpy(np.concatenate(bucket)) for bucket in zip(*chunks, strict=True)]


# Evaluation.


@dataclass(frozen=True, slots=True)
class TaskScore:
    """How one task's held-out answers come out under greedy decoding."""

    exact: float  # share of answers whose every token, the end token included, is the likeliest one
    loss: float  # mean negative log-likelihood of an answer token
    margin: float  # smallest lead of the right token over the best wrong one, in logits; negative where one is wrong


def evaluation_rows(tokenizer: Tokenizer, num_examples: int) -> dict[str, list[Tensor]]:
    """Encode held-out examples of every task, each in one of the chat forms of training, as a single question."""
    import torch

    rng = random.Random("evaluation forms")
    rows = {}
    for task in TASKS:
        examples = held_out_examples(task, num_examples, seed=1)
        conversations = [render([ex], random_system_prompt(rng), rng.random() < 0.5) for ex in examples]
        rows[task] = [torch.from_numpy(bucket) for bucket in encode_rows(tokenizer, conversations)]
    return rows


def score_task(model: Qwen3ForCausalLM, buckets: list[Tensor]) -> TaskScore:
    """Score one task in a single pass: greedy decoding yields an answer exactly if each of its tokens is the argmax."""
    import torch

    exact, losses, margins = [], [], []
    for rows in (part for bucket in buckets if len(bucket) for part in bucket.split(128)):
        rows = rows.to(model.device).long()  # (num_rows, width)
        with torch.inference_mode():
            logits = model(input_ids=rows % ANSWER_FLAG, use_cache=False).logits[:, :-1].float()
        targets, is_answer = rows[:, 1:] % ANSWER_FLAG, rows[:, 1:] >= ANSWER_FLAG  # (num_rows, width - 1)
        right = logits.gather(-1, targets[..., None])[..., 0]
        best_wrong = logits.scatter(-1, targets[..., None], -math.inf).amax(-1)
        exact.append(((right > best_wrong) | ~is_answer).all(-1))
        losses.append((logits.logsumexp(-1) - right)[is_answer])
        margins.append((right - best_wrong)[is_answer])
    return TaskScore(
        exact=torch.cat(exact).float().mean().item(),
        loss=torch.cat(losses).mean().item(),
        margin=torch.cat(margins).min().item(),
    )


def score(model: Qwen3ForCausalLM, rows: dict[str, list[Tensor]]) -> dict[str, TaskScore]:
    """Score every task."""
    return {task: score_task(model, buckets) for task, buckets in rows.items()}


def evaluate(folder: Path, num_examples: int, device: str) -> dict[str, TaskScore]:
    """Load a saved folder, print its scores as a table for float32 and bfloat16 arithmetic, return the first."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    rows = evaluation_rows(Tokenizer.from_file(str(folder / "tokenizer.json")), num_examples)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").to(device).eval()
    scores = {dtype: score(model.to(dtype), rows) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, table in scores.items():
        for task, result in table.items():
            print(f"{dtype} {task:10} exact {result.exact:.4f} loss {result.loss:.6f} margin {result.margin:.2f}")
    return scores[torch.float32]


# Training.


def build_model(folder: Path, device: str) -> Qwen3ForCausalLM:
    """Build the model of the folder's config.json with fresh float32 weights."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    return Qwen3ForCausalLM(config).float().to(device)


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the weights as bfloat16, without the output layer: it is the embedding."""
    import torch
    from safetensors.torch import save_file

    state = {name: weight.to("cpu", torch.bfloat16) for name, weight in model.state_dict().items()}
    del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone


def train_step(
    model: Qwen3ForCausalLM, pools: list[Tensor], batch_sizes: list[int], optimizer: torch.optim.Optimizer
) -> Tensor:
    """Take one optimizer step over a random batch of every pool; return its mean loss, a scalar on the device."""
    import torch
    import torch.nn.functional as F

    device = model.device
    batches = []
    for pool, size in zip(pools, batch_sizes, strict=True):
        picks = torch.randint(len(pool), (size,), device=device)
        batches.append(pool[picks].long())  # (size, width)
    num_answer_tokens = sum((batch[:, 1:] >= ANSWER_FLAG).sum() for batch in batches)
    total = torch.zeros((), device=device)
    for batch in batches:
        ids = batch % ANSWER_FLAG
        targets = torch.where(batch >= ANSWER_FLAG, ids, -100)[:, 1:]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # (size, width - 1, vocab)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / num_answer_tokens
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def build_optimizer(model: Qwen3ForCausalLM, weight_decay: float) -> torch.optim.Optimizer:
    """Build AdamW at rate zero; norm weights do not decay."""
    import torch

    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def learning_rate(progress: float, peak: float) -> float:
    """Warm up over the first 3%, then fall along a cosine to zero; progress runs from 0 to 1."""
    if progress < 0.03:
        return peak * (progress + 1e-3) / 0.03
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.03) / 0.97)))


def train(args: argparse.Namespace) -> None:
    """Train from scratch within the time limit; the folder always holds the best weights so far."""
    import torch

    start = time.monotonic()
    deadline = start + args.seconds
    torch.manual_seed(args.seed)
    tokenizer = write_folder(args.out, args.seed)
    pools = make_pools(args.out, args.conversations, args.workers, args.seed, start + 0.25 * args.seconds)
    num_rows = sum(map(len, pools))
    # Every step takes from each width its share, so that all steps see the same mix.
    batch_sizes = [max(1, round(args.batch_size * len(pool) / num_rows)) for pool in pools]
    print(f"{num_rows} rows after {time.monotonic() - start:.0f} s; a step has {batch_sizes} of {ROW_WIDTHS} tokens")

    pools = [pool.to(args.device) for pool in pools]
    model = build_model(args.out, args.device)
    rounded = build_model(args.out, args.device).eval()  # a copy that is scored after rounding, as it is saved
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    optimizer = build_optimizer(model, args.weight_decay)
    if args.compile:
        torch._dynamo.config.suppress_errors = True  # a layer that does not compile runs as it is
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    loss = train_step(model, pools, batch_sizes, optimizer)  # at rate zero: it only compiles
    print(f"first loss {loss.item():.3f} after {time.monotonic() - start:.0f} s", flush=True)

    rows = evaluation_rows(tokenizer, args.examples)
    train_start = time.monotonic()
    next_report, best, step, progress = train_start + args.report_seconds, (-1.0, 0.0), 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.peak_learning_rate)
        loss = train_step(model, pools, batch_sizes, optimizer)
        step += 1
        if step % 8 == 0 or args.device == "cpu":
            loss.item()  # keep the host from running far ahead of the clock
        now = time.monotonic()
        progress = max(step / args.steps, (now - train_start) / max(deadline - train_start, 1e-9))
        if now < next_report and progress < 1.0:
            continue
        next_report = now + args.report_seconds
        rounded.load_state_dict({name: weight.bfloat16() for name, weight in model.state_dict().items()})
        scores = score(rounded, rows)
        table = " ".join(f"{task} {result.exact:.3f}" for task, result in scores.items())
        print(f"{now - start:4.0f} s  step {step}  loss {loss.item():.5f}  {table}", flush=True)
        mean_exact = sum(result.exact for result in scores.values()) / len(scores)
        mean_loss = sum(result.loss for result in scores.values()) / len(scores)
        # Of two weights that answer equally well, the lower loss has the larger margins.
        if (round(mean_exact, 3), -mean_loss) > best:
            best = (round(mean_exact, 3), -mean_loss)
            save_weights(rounded, args.out)
            write_card(args.out, args, scores, step, time.monotonic() - start)


CARD = """\
---
license: mit
---

# nanoinfer tiny Qwen3

A {megabytes:.1f} MB language model with the architecture and the chat format of Qwen3, made so that nanoinfer's tests
and examples run a real checkpoint without a download. It was trained from scratch by
`tests/tiny_checkpoint/train.py` on text which that script generates; no other data and no other model's weights
went into it.

It answers eight kinds of question in English, directly and without reasoning. Accuracy is the share of {num_examples}
examples whose whole answer comes out right under greedy decoding with the saved bfloat16 weights. These examples were
not trained on (the best weights were chosen by them), except for primes and introductions, where every answer is part
of the training text.

| task | example | answer | accuracy |
|---|---|---|---|
{table}

- Operands are 0 to 999, lists have two to six items, numbers in lists are below 100, counting stays within 0 to 120
  and takes at most 20 steps, words are lower-case English, limits for primes are 3 to 100.
- Training: {step} steps of AdamW on {batch_size} conversations each, {seconds:.0f} seconds in all, cosine schedule,
  loss on the answers only. One conversation in five has two to four questions, three in ten have a system prompt, and
  half end in the empty thinking block that `enable_thinking=False` adds.
- Tokenizer: byte-level BPE of {vocab_size} entries that splits numbers into digits and round-trips any text.
- Limits: any other question gets a meaningless answer. It does not reason, call tools or know facts.

License: MIT.
"""


def write_card(folder: Path, args: argparse.Namespace, scores: dict[str, TaskScore], step: int, seconds: float) -> None:
    """Write README.md with the accuracy that was measured."""
    samples = {task: held_out_examples(task, 1)[0] for task in TASKS}
    lines = [f"| {t} | {samples[t].question} | {samples[t].answer} | {100 * scores[t].exact:.1f}% |" for t in TASKS]
    card = CARD.format(
        megabytes=sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        num_examples=args.examples,
        table="\n".join(lines),
        step=step,
        batch_size=args.batch_size,
        seconds=seconds,
        vocab_size=VOCAB_SIZE,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Parse the command line, then train or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--out", type=Path, help="train, and write the checkpoint to this folder")
    goal.add_argument("--evaluate", type=Path, help="only measure the checkpoint in this folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps, if time allows them")
    parser.add_argument("--seconds", type=float, default=420.0, help="wall time of the whole training")
    parser.add_argument("--batch-size", type=int, default=1024, help="conversations in a step")
    parser.add_argument("--peak-learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--conversations", type=int, default=6_000_000, help="how many to generate at most")
    parser.add_argument("--workers", type=int, default=14, help="processes that generate them")
    parser.add_argument("--examples", type=int, default=512, help="held-out examples of each task in an evaluation")
    parser.add_argument("--report-seconds", type=float, default=15.0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.evaluate:
        evaluate(args.evaluate, args.examples, args.device)
    else:
        train(args)
        evaluate(args.out, args.examples, args.device)


if __name__ == "__main__":
    main()
