"""An engine under load for long: every request ends once, with the right answer, and nothing is left behind.

SOAK_REQUESTS says how many requests the long test has, SOAK_SEED which ones, SOAK_DEVICE where it runs ("cuda" on a
GPU).
"""

import gc
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch

from nanoinfer import LLM, RequestOutput, SamplingParams, tiny_model_path
from tests.tiny_checkpoint.tasks import TASKS, Example, held_out_examples

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "50000"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
DEVICE = os.environ.get("SOAK_DEVICE", "cpu")
LONGEST = 16  # tokens of a completion
NUM_PROMPTS = 60
OPTIONS = {"kvcache_block_size": 16, "max_model_len": 192, "max_num_seqs": 24, "max_num_batched_tokens": 256}


@dataclass(frozen=True)
class Wanted:
    """A request, and what it must generate if it is greedy and nobody aborts it."""

    prompt: str
    params: SamplingParams
    token_ids: list[int]
    text: str | None  # None where a stop string cuts it
    finish_reason: str


def make_prompts(llm: LLM) -> list[str]:
    """Questions of all kinds; many begin with the same system prompt, or a turn that was answered before."""
    random = Random(1)
    examples: list[Example] = [held_out_examples(task, 40, seed=1)[index] for task in TASKS for index in range(20)]
    prompts = []
    for _ in range(NUM_PROMPTS):
        messages = [{"role": "system", "content": "You are a helpful assistant."}] * random.randint(0, 1)
        if random.random() < 0.3:
            first = examples[random.randint(0, 5)]
            messages += [{"role": "user", "content": first.question}, {"role": "assistant", "content": first.answer}]
        messages += [{"role": "user", "content": random.choice(examples).question}]
        prompts.append(llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return prompts


class Requests:
    """Random requests, and the answers that an engine with room to spare gives, one prompt after another."""

    def __init__(self, random: Random) -> None:
        self.random = random
        options = {**OPTIONS, "num_kvcache_blocks": 300, "enable_prefix_caching": False}
        with LLM(tiny_model_path(), device=DEVICE, **options) as llm:
            self.prompts = make_prompts(llm)
            greedy = SamplingParams(temperature=0, max_tokens=LONGEST)
            self.answers = llm.generate(self.prompts, greedy, use_tqdm=False)
            self.words = [[llm.decode([token_id]) for token_id in output.token_ids] for output in self.answers]

    def next(self) -> Wanted:
        random = self.random
        index = min(random.randrange(NUM_PROMPTS), random.randrange(NUM_PROMPTS))  # some are asked more often
        answer = self.answers[index]
        params = SamplingParams(temperature=0, max_tokens=random.randint(1, LONGEST))
        token_ids, text, reason = answer.token_ids[: params.max_tokens], None, "length"
        if len(token_ids) == len(answer.token_ids):
            reason = answer.finish_reason
        kind = random.random()
        if kind < 0.2:
            return Wanted(self.prompts[index], replace(params, temperature=1.0), [], None, "")
        if kind < 0.4:
            stop = random.choice(token_ids)
            token_ids, reason = token_ids[: token_ids.index(stop) + 1], "stop"
            params = replace(params, stop_token_ids=[stop])
        elif kind < 0.6 and (word := random.choice(self.words[index][: len(token_ids)]).strip()):
            text = answer.text.partition(word)[0]
            params = replace(params, stop=[word], max_tokens=LONGEST)
            token_ids, reason = answer.token_ids, "stop"
        return Wanted(self.prompts[index], params, token_ids, text, reason)


def is_right(wanted: Wanted, output: RequestOutput) -> bool:
    """Whether an output is what was wanted; an aborted one may be its beginning."""
    token_ids, reason = output.token_ids, output.finish_reason
    if wanted.params.temperature > 0:
        return reason == "abort" or 1 <= len(token_ids) <= wanted.params.max_tokens
    if reason == "abort" or wanted.text is not None:
        is_beginning = token_ids == wanted.token_ids[: len(token_ids)]
        return is_beginning and (reason == "abort" or (output.text, reason) == (wanted.text, "stop"))
    return (token_ids, reason) == (wanted.token_ids, wanted.finish_reason)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def gpu_bytes() -> int:
    """What the tensors on the GPU take, the cache included; 0 on a CPU."""
    if DEVICE != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_requests", [60, pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)])
def test_under_load_every_request_ends_once_with_the_right_answer_and_nothing_is_left(num_requests: int) -> None:
    random = Random(SEED)
    requests = Requests(random)
    waiting: dict[int, Wanted] = {}
    counts: Counter[str] = Counter()
    with LLM(tiny_model_path(), device=DEVICE, num_kvcache_blocks=40, **OPTIONS) as llm:
        llm.engine.scheduler.reserved_tokens = 0  # so that blocks run short all the time
        aborted: set[int] = set()
        before = (0, 0, 0, 0)
        num_added = 0
        while waiting or num_added < num_requests:
            for _ in range(min(random.randint(0, 6), num_requests - num_added, 60 - len(waiting))):
                wanted = requests.next()
                request_id = llm.add_request(wanted.prompt, wanted.params, priority=random.choice([0, 0, 0, 1, -1]))
                waiting[request_id] = wanted
                num_added += 1
                if num_added == num_requests // 5:
                    before = (resident_bytes(), num_open_files(), len(gc.get_objects()), gpu_bytes())
            if waiting and random.random() < 0.03:
                aborted.add(random.choice(sorted(waiting)))
                llm.abort(list(aborted & waiting.keys()))
            if random.random() < 0.001:
                llm.reset_prefix_cache()
            for output in llm.step():
                wanted = waiting.pop(output.request_id)  # a KeyError, if it ended before
                counts["wrong"] += not is_right(wanted, output)
                counts[output.finish_reason] += 1
                assert output.finish_reason != "abort" or output.request_id in aborted

        assert sum(counts.values()) - counts["wrong"] == num_requests
        assert counts["wrong"] <= (0 if DEVICE == "cpu" else num_requests // 200), "16 bits have near ties"
        assert min(counts["stop"], counts["length"], counts["abort"]) > num_requests / 100
        assert llm.get_metrics().num_preemptions > num_requests / 20
        assert llm.get_metrics().prefix_hit_rate > 0.1
        assert llm.is_finished()
        assert llm.engine.block_manager.num_used_blocks == 0
        for _ in range(OPTIONS["max_num_seqs"]):
            llm.add_request("1", SamplingParams(max_tokens=1))
        llm.engine.scheduler.schedule()
        assert len(llm.engine.scheduler.running) == OPTIONS["max_num_seqs"], "all rows can be used again"
        gc.collect()
        after = (resident_bytes(), num_open_files(), len(gc.get_objects()), gpu_bytes())
        assert after[0] - before[0] < 64 * 2**20, "memory grows"
        assert after[1] == before[1]
        assert after[2] - before[2] < 5000, "objects are kept"
        assert after[3] - before[3] < 2**20, "memory on the GPU grows"
