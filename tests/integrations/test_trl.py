"""TRL's GRPOTrainer with the tiny checkpoint, on a CPU: samples and log-probabilities come from the engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoinfer import LLM, ConfigError, ModelError, RequestError, SamplingParams, tiny_model_path
from nanoinfer.integrations.trl import rollout_func
from tests.integrations.snippets import snippet

pytest.importorskip("trl")

import datasets
from trl import GRPOConfig, GRPOTrainer

pytestmark = [
    # Of old names and of what is experimental, which TRL and transformers themselves use.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WORDS = ["Hello", "What", "Tell me", "I am", "You", "Spell", "Red", "Count"]
Rollout = Callable[[list[Any], Any], dict[str, Any]]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


@pytest.fixture
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_model_len": 128}
    with LLM(tiny_model_path(), device="cpu", logprobs_mode="processed_logprobs", **options) as llm:
        yield llm


def make_trainer(folder: Path, rollout: Rollout, prompts: list[Any] = WORDS, **options: Any) -> GRPOTrainer:
    config: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    config |= {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    config |= {"learning_rate": 2e-4, "lr_scheduler_type": "constant", "max_steps": 1, "logging_steps": 1}
    config |= {"save_strategy": "no", "disable_tqdm": True, "seed": 1, **options}
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    reward = share_of_digits if isinstance(prompts[0], str) else lambda completions, **_: [0.0] * len(completions)
    return GRPOTrainer(
        model=str(tiny_model_path()),
        args=GRPOConfig(output_dir=str(folder), **config),
        train_dataset=rows,
        eval_dataset=rows,
        reward_funcs=reward,
        rollout_func=rollout,
    )


def noting(rollout: Rollout, calls: list[Any]) -> Rollout:
    """The same, with prompts, output and step of each call noted."""

    def call(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = rollout(prompts, trainer)
        calls.append(SimpleNamespace(prompts=prompts, step=trainer.state.global_step, **output))
        return output

    return call


def test_the_reward_rises(llm: LLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 32, "num_generations": 8, "max_steps": 10}
    trainer = make_trainer(tmp_path, rollout_func(llm), WORDS * 2, **options)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 10
    assert sum(rewards[:2]) / 2 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.4


@torch.inference_mode()
def logprobs_of_trainer(trainer: GRPOTrainer, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Those that the loss is made of: of the logits divided by the temperature."""
    logits = trainer.model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / trainer.temperature).log_softmax(dim=1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("sleep_level", [None, 1, 2])
def test_a_row_has_one_completion_and_the_trainers_own_log_probabilities(
    llm: LLM, tmp_path: Path, sleep_level: int | None
) -> None:
    calls: list[Any] = []
    rollout = noting(rollout_func(llm, sleep_level=sleep_level), calls)
    trainer = make_trainer(tmp_path, rollout, temperature=0.7, max_steps=2)
    trainer.train()
    assert [call.step for call in calls] == [0, 1]
    trainer.state.global_step += 1  # once more, with the weights that training ended with
    rollout(WORDS, trainer)
    call = calls[-1]
    assert call.prompts == WORDS
    assert call.prompt_ids == [trainer.processing_class(text)["input_ids"] for text in WORDS]
    assert len(call.completion_ids) == len(call.logprobs) == len(WORDS)
    for prompt, completion, logprobs in zip(call.prompt_ids, call.completion_ids, call.logprobs, strict=True):
        assert 1 <= len(completion) <= 8
        assert all(type(value) is float for value in logprobs)
        expected = logprobs_of_trainer(trainer, prompt, completion)
        assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
    first = calls[0]
    assert [first.prompts[i : i + 4] for i in range(0, 16, 4)] == [[first.prompts[i]] * 4 for i in range(0, 16, 4)]
    assert len({str(ids) for ids in first.completion_ids}) > 8, "rows of one prompt draw different tokens"
    assert llm.engine.runner.sleeping_tags == ({"weights", "kv_cache"} if sleep_level else set())  # type: ignore[union-attr]


def test_weights_are_pushed_when_the_step_has_changed_and_evaluation_gets_one_completion_a_row(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes: list[int] = []
    update, calls = llm.update_weights, []
    rollout = noting(rollout_func(llm), calls)
    options: dict[str, Any] = {"per_device_eval_batch_size": 8, "num_generations_eval": 2, "steps_per_generation": 2}
    trainer = make_trainer(tmp_path, rollout, max_steps=4, eval_strategy="steps", eval_steps=2, **options)

    def count(named_tensors: Any) -> None:
        pushes.append(trainer.state.global_step)
        update(named_tensors)

    monkeypatch.setattr(llm, "update_weights", count)
    trainer.train()
    assert sorted({call.step for call in calls}) == pushes == [0, 2, 4]
    of_evaluation = [call for call in calls if len(call.prompts) == 8]
    assert len(of_evaluation) == 4, "8 prompts, 2 completions each, 8 rows at a time, twice"
    assert all(len(call.completion_ids) == 8 for call in of_evaluation)


def test_messages_are_written_out_by_the_chat_template(llm: LLM, tmp_path: Path) -> None:
    calls: list[Any] = []
    prompts = [[{"role": "user", "content": f"What is {number} + 48?"}] for number in range(8)]
    trainer = make_trainer(tmp_path, noting(rollout_func(llm), calls), prompts)
    trainer.train()
    template = trainer.processing_class.apply_chat_template
    for messages, prompt_ids in zip(calls[0].prompts, calls[0].prompt_ids, strict=True):
        assert prompt_ids == template(messages, add_generation_prompt=True)["input_ids"]
    begun = [[*prompts[0], {"role": "assistant", "content": "0 + 4"}]]
    output = rollout_func(llm)(begun, trainer)
    assert output["prompt_ids"] == [template(begun[0], continue_final_message=True)["input_ids"]]


def test_the_trainers_config_and_own_params_decide_how_tokens_are_drawn(llm: LLM, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func(llm), top_k=1, generation_kwargs={"min_tokens": 8})
    greedy = rollout_func(llm)(WORDS, trainer)
    assert {len(ids) for ids in greedy["completion_ids"]} == {8}
    assert {value for logprobs in greedy["logprobs"] for value in logprobs} == {0.0}, "each was the only one left"
    own = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    sampled = rollout_func(llm, own)(WORDS, trainer)
    assert {len(ids) for ids in sampled["completion_ids"]} == {3}
    trainer.args.generation_kwargs = {"n": 2}
    with pytest.raises(RequestError, match="n=2 in a rollout: the trainer's sampler repeats the prompts; use n=1"):
        rollout_func(llm)(WORDS, trainer)


def test_processes_draw_differently_and_a_run_draws_again_what_it_drew(llm: LLM, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func(llm))

    def sample(process_index: int) -> list[list[int]]:
        named = ("args", "state", "model", "tools", "chat_template", "chat_template_kwargs")
        like = {name: getattr(trainer, name) for name in named}
        process = SimpleNamespace(process_index=process_index)
        return rollout_func(llm)(["Hello"] * 4, SimpleNamespace(accelerator=process, **like))["completion_ids"]

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_adapters_are_merged_into_the_weights_and_stay_in_the_trainer(llm: LLM, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, rollout_func(llm))
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer.model = peft.get_peft_model(trainer.model, adapters)
    output = rollout_func(llm)(["Hello"], trainer)
    expected = logprobs_of_trainer(trainer, output["prompt_ids"][0], output["completion_ids"][0])
    assert (torch.tensor(output["logprobs"][0]) - expected).abs().max() < 1e-4
    assert any("lora_" in name for name, _ in trainer.model.named_parameters())


@pytest.mark.parametrize("sleep_level", [None, 2])
def test_an_engine_with_enable_lora_gets_the_adapter_alone(
    tmp_path: Path, sleep_level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_model_len": 128}
    options |= {"logprobs_mode": "processed_logprobs", "enable_lora": True}
    with LLM(tiny_model_path(), device="cpu", **options) as llm:
        rollout, sent = rollout_func(llm, sleep_level=sleep_level), list[str]()
        update = llm.update_weights

        def note(weights: Any, **its: Any) -> None:
            given = dict(weights)
            sent.extend(given)
            update(given, **its)

        monkeypatch.setattr(llm, "update_weights", note)
        trainer = make_trainer(tmp_path, rollout)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        trainer.model = peft.get_peft_model(trainer.model, adapters)
        first = rollout(["Hello"], trainer)
        with torch.no_grad():
            for name, param in trainer.model.named_parameters():
                if "lora_B" in name:
                    param.mul_(-3)
        trainer.state.global_step += 1
        for output in (first, rollout(["Hello"], trainer)):
            expected = logprobs_of_trainer(trainer, output["prompt_ids"][0], output["completion_ids"][0])
            is_near = (torch.tensor(output["logprobs"][0]) - expected).abs().max() < 1e-4
            assert bool(is_near) == (output is not first), "the first is of the matrices before"
        assert all("lora_" in name for name in sent) == (sleep_level is None)
        assert sum("lora_" in name for name in sent) == 2 * 2 * len(trainer.model.base_model.model.model.layers)


def test_a_row_without_numbers_is_an_error(llm: LLM, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func(llm))
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(
        ModelError, match=r"row 0 of 8 cannot be sampled: the logits are NaN or infinite after 0 tokens"
    ):
        rollout_func(llm)(WORDS, trainer)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=2), "n=2 in a rollout"),
        (SamplingParams(seed=3), "seed=3 would draw the same tokens for all rows of a prompt; leave it out"),
        (SamplingParams(logprobs=5), "5 logprobs in a rollout: only those of the sampled tokens are used"),
    ],
)
def test_params_that_a_rollout_cannot_have_are_refused(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rollout_func(llm, params)
    rollout_func(llm, replace(SamplingParams(), logprobs=0))


def test_an_engine_with_other_log_probabilities_is_refused(llm: LLM) -> None:
    with pytest.raises(
        ConfigError, match=r"sleep_level=3 is not known; use None to stay awake, 1 or 2 as in LLM.sleep"
    ):
        rollout_func(llm, sleep_level=3)
    refused = pytest.raises(ConfigError, match="make it with logprobs_mode='processed_logprobs'")
    with LLM(tiny_model_path(), device="cpu", num_kvcache_blocks=16) as other, refused:
        rollout_func(other)


def test_the_snippet_of_the_documents_learns_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(snippet("TRL"), names)
    names["llm"].close()
    rewards = [entry["reward"] for entry in names["trainer"].state.log_history if "reward" in entry]
    assert len(rewards) == 6
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.8
