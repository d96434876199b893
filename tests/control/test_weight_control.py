"""Weights that are replaced while an engine runs, and engines that sleep: the answers are those of a new engine."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LLM, ConfigError, EngineClosedError, EngineStateError, ModelError, SamplingParams
from nanoinfer.checkpoint import weights
from nanoinfer.checkpoint.loader import iterate_weights
from nanoinfer.checkpoint.weights import ModelWeights
from nanoinfer.models import REGISTRY
from nanoinfer.runner import memory
from nanoinfer.runner.device_runner import DeviceRunner
from tests.models.test_architectures import draw_options, draw_prompts
from tests.quantization.test_checkpoints import FORMATS, plain_folder, write_pair  # noqa: F401 (a fixture)

Tokens = list[list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = draw_prompts(0, (1, 15, 16, 17, 40))
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


class Foreign(Tensor):
    """A tensor whose operators are not PyTorch's own, as those of DTensor are."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody is to compute with it")


def save_random(folder: Path, architecture: str, seed: int, **overrides: Any) -> Path:
    """Write a random float32 model as transformers saves it; the sizes do not depend on the seed."""
    folder.mkdir()
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**draw_options(architecture, 0) | overrides))
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.normal_(mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.2)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape: Llama with biases and two KV heads, its head apart from its embedding."""
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    options = {**sizes, "intermediate_size": 128, "attention_bias": True, "mlp_bias": True}
    paths = (save_random(folder / str(i), "LlamaForCausalLM", i, **options, tie_word_embeddings=False) for i in (0, 1))
    first, second = paths
    return first, second


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def shared(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(pair[0], device="cpu", tensor_parallel_size=request.param, kvcache_block_size=16) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, pair: tuple[Path, Path]) -> Iterator[LLM]:
    """An engine with the weights of the first checkpoint."""
    shared.update_weights(iterate_weights(pair[0]))
    yield shared
    assert shared.is_finished()


def generate(llm: LLM, prompts: Tokens = PROMPTS) -> Tokens:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def answers(folder: Path, **options: Any) -> Tokens:
    with LLM(folder, device="cpu", **options) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> tuple[Tokens, Tokens]:
    """What new engines of the two checkpoints say."""
    first, second = map(answers, pair)
    assert first != second
    return first, second


# --- update_weights ---


def test_after_an_update_the_answers_are_those_of_a_new_engine(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    assert generate(llm) == expected[0]
    llm.update_weights(load_file(pair[1] / "model.safetensors"))
    assert generate(llm) == expected[1]
    llm.update_weights(iterate_weights(pair[0]))
    assert generate(llm) == expected[0]


def test_the_parameters_of_a_trainer_are_taken_as_they_are(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    """They require gradients, and one of them is not contiguous, and one has 64 bits."""
    trainer = transformers.AutoModelForCausalLM.from_pretrained(pair[1])
    llm.update_weights(trainer.named_parameters())
    assert generate(llm) == expected[1]
    weight = trainer.model.layers[0].self_attn.q_proj.weight
    assert not weight.t().contiguous().t().is_contiguous()
    llm.update_weights(iterate_weights(pair[0]))
    llm.update_weights({Q_PROJ: weight.t().contiguous().t()})
    llm.update_weights((name, param.double()) for name, param in trainer.named_parameters() if name != Q_PROJ)
    assert generate(llm) == expected[1]


@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_experts_that_a_trainer_has_in_one_tensor_are_taken_as_they_are(
    tmp_path: Path, architecture: str, rank_count: int
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64}
    sizes |= (
        {"moe_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1} if "Qwen" in architecture else {}
    )
    old, new = (save_random(tmp_path / str(seed), architecture, seed, **sizes) for seed in (0, 1))
    trainer = transformers.AutoModelForCausalLM.from_pretrained(new)
    if not any(param.dim() == 3 for param in trainer.parameters()):
        pytest.skip("this version of transformers has each expert for itself")
    with LLM(old, device="cpu", tensor_parallel_size=rank_count) as llm:
        llm.update_weights(trainer.named_parameters())
        assert generate(llm) == answers(new)


def test_cached_prefixes_of_the_weights_before_are_forgotten(llm: LLM, pair: tuple[Path, Path]) -> None:
    generate(llm)
    [output] = llm.generate(PROMPTS[-1:], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32
    name, tensor = next(iterate_weights(pair[0]))
    llm.update_weights({name: tensor})
    [output] = llm.generate(PROMPTS[-1:], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 64, "tie_word_embeddings": False}),
        ("MixtralForCausalLM", {"tie_word_embeddings": True}),
        ("Phi3ForCausalLM", {"tie_word_embeddings": True}),
        ("Gemma3ForCausalLM", {}),
    ],
)
def test_experts_packed_and_tied_weights_and_offset_norms_are_updated(
    tmp_path: Path, architecture: str, options: dict[str, Any], rank_count: int
) -> None:
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64}
    old, new = (save_random(tmp_path / str(seed), architecture, seed, **options) for seed in (0, 1))
    with LLM(old, device="cpu", tensor_parallel_size=rank_count) as llm:
        before = generate(llm)
        llm.update_weights(iterate_weights(new))
        assert generate(llm) == answers(new) != before


@pytest.mark.parametrize("rank_count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_new_weights_are_rounded_to_8_bits_as_those_of_the_checkpoint_were(
    tmp_path: Path, architecture: str, rank_count: int
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 256}
    sizes |= {"moe_intermediate_size": 256, "head_dim": 64} if "Moe" in architecture else {}
    old, new = (save_random(tmp_path / str(seed), architecture, seed, **sizes) for seed in (0, 1))
    with LLM(old, device="cpu", tensor_parallel_size=rank_count, quantization="fp8") as llm:
        before = generate(llm)
        llm.update_weights(iterate_weights(new))
        assert generate(llm) == answers(new, quantization="fp8") != before
        if rank_count == 1:
            llm.sleep(level=2)
            llm.wake_up()
            llm.update_weights(iterate_weights(old))
            assert generate(llm) == before


@pytest.mark.parametrize("name", ["blocks", "static tensors", "compressed channels", "compressed static"])
def test_a_checkpoint_in_8_bits_is_updated_by_weights_and_scales(
    plain_folder: Callable[[bool], Path],  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    folder, wide = write_pair(plain_folder(False), tmp_path, FORMATS[name])
    with LLM(folder, device="cpu") as llm:
        before = generate(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(dict(iterate_weights(folder)))
        assert generate(llm) == before
        with pytest.raises(
            ModelError, match=r"_proj.weight' cannot be updated: the weight is in 32 bits .torch.float32., and"
        ):
            llm.update_weights(dict(iterate_weights(wide)))


def test_without_a_mistake_names_invert_where_tensors_go(tmp_path: Path) -> None:
    for architecture in REGISTRY:
        if architecture.endswith("ForConditionalGeneration"):
            continue  # names of a text part are tested with the others
        folder = save_random(tmp_path / architecture, architecture, 0)
        with LLM(folder, device="cpu", num_kvcache_blocks=2, max_model_len=32) as llm:
            model = llm.engine.runner.model
            weights = ModelWeights(model)
            assert all(model.locate(model.checkpoint_name(place)) == place for place in weights._homes)
            saved = {name for name, _ in iterate_weights(folder)} - {*model.ignored_weights}
            assert saved <= {*weights.names()}


# --- what does not fit ---


def test_a_wrong_name_is_refused_with_close_ones_and_nothing_of_a_dict_is_copied(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    tensors = load_file(pair[1] / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn.q_prj.weight' cannot .*: close ones are "
                       r"model.layers.0.self_attn.q_proj.weight"):  # fmt: skip
        llm.update_weights(tensors | {"model.layers.0.self_attn.q_prj.weight": tensors[Q_PROJ]})
    with pytest.raises(ModelError, match=r"'x' cannot be updated: .* it has model.embed_tokens.weight and so on"):
        llm.update_weights(tensors | {"x": tensors[Q_PROJ]})
    with pytest.raises(ModelError, match=r"it has shape \(3, 128\), config.json implies \(128, 128\)"):
        llm.update_weights(tensors | {Q_PROJ: torch.zeros(3, 128)})
    with pytest.raises(ModelError, match=r"it has torch.int64, and only floating-point"):
        llm.update_weights(tensors | {Q_PROJ: torch.zeros(128, 128, dtype=torch.int64)})
    with pytest.raises(ModelError, match=r"cannot be updated: it is a ndarray; give a tensor"):
        llm.update_weights(tensors | {Q_PROJ: tensors[Q_PROJ].numpy()})
    with pytest.raises(ModelError, match=r"0 is no name of a weight; give pairs of a name and a tensor"):
        llm.update_weights(enumerate(tensors.values()))
    assert generate(llm) == expected[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensor: tensor.to("meta"),
            "it has no values (it is on the device meta, or not initialized); give a plain",
        ),
        (lambda tensor: tensor.to_sparse(), "it has the layout torch.sparse_coo; give a plain dense tensor"),
        (lambda tensor: tensor.as_subclass(Foreign), "it is a Foreign; give a plain dense tensor"),
    ],
    ids=["meta", "sparse", "with operators of its own"],
)
def test_a_tensor_without_plain_values_is_refused_on_all_ranks(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens], change: Callable[[Tensor], Tensor], message: str
) -> None:
    tensors = load_file(pair[1] / "model.safetensors")
    wrong = {Q_PROJ: change(tensors[Q_PROJ])}
    for named_tensors in (tensors | wrong, wrong.items()):
        with pytest.raises(ModelError, match=re.escape(f"'{Q_PROJ}' cannot be updated: {message}")):
            llm.update_weights(named_tensors)
    assert generate(llm) == expected[0]


@pytest.mark.parametrize(
    ("named_tensors", "message"),
    [
        (5, "named_tensors is a int; give a dict of names to tensors, or an iterable of pairs of a name and a tensor"),
        (None, "named_tensors is a NoneType; give a dict"),
        ("model.norm.weight", "named_tensors is a str; give a dict"),
        (torch.zeros(2, 2), "named_tensors is a Tensor; give a dict"),
        ([("x",)], "named_tensors has ('x',) in place of a pair; give a dict"),
        ([5], "named_tensors has 5 in place of a pair; give a dict"),
        (["ab"], "named_tensors has 'ab' in place of a pair; give a dict"),
        ([("x", torch.zeros(2), 1)], "named_tensors has ('x', tensor([0., 0.]), 1) in place of a pair; give a dict"),
        ([("x", 5)], "'x' cannot be updated: it is a int; give a tensor"),
    ],
    ids=str,
)
def test_what_is_no_pair_of_a_name_and_a_tensor_is_refused(
    llm: LLM, expected: tuple[Tokens, Tokens], named_tensors: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        llm.update_weights(named_tensors)
    assert generate(llm) == expected[0]


def test_of_an_iterable_what_came_before_the_mistake_stays(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    tensors = load_file(pair[1] / "model.safetensors")
    wrong = [*tensors.items(), (Q_PROJ, torch.zeros(3, 3))]
    with pytest.raises(ModelError, match=f"config.json implies .*; the {len(tensors)} before it were copied, and stay"):
        llm.update_weights(iter(wrong))
    assert generate(llm) == expected[1]


def test_tables_that_the_engine_computes_itself_are_passed_over(llm: LLM) -> None:
    llm.update_weights({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tied_head_is_another_name_of_the_embedding(pair: tuple[Path, Path], num_ranks: int) -> None:
    tensors = load_file(pair[0] / "model.safetensors")
    new, other = torch.ones_like(tensors[EMBEDDING]), torch.zeros_like(tensors[EMBEDDING])
    overrides = {"tie_word_embeddings": True}
    with LLM(
        pair[0],
        device="cpu",
        hf_overrides=overrides,
        load_format="dummy",
        tensor_parallel_size=num_ranks,
        num_kvcache_blocks=4,
    ) as llm:
        runner = llm.engine.runner
        weight = (runner if num_ranks == 1 else runner._runner).model.model.embed_tokens.weight
        for update in ({HEAD: new}, {EMBEDDING: other}, {HEAD: new, EMBEDDING: new}, {EMBEDDING: other, HEAD: other}):
            llm.update_weights(update)
            assert weight.eq(next(iter(update.values()))[0, 0]).all()
        for first, second in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
            for pairs in ({first: new, second: other}, iter([(first, new), (second, other)])):
                message = (
                    f"'{second}' cannot be updated: it differs from {first}, and config.json ties one to the other"
                )
                with pytest.raises(ModelError, match=message):
                    llm.update_weights(pairs)
        with pytest.raises(ModelError, match=r"'lm_head.weight' cannot be updated: it has shape \(3,\)"):
            llm.update_weights({HEAD: torch.zeros(3)})


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


# --- sleep ---


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_says_the_same(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens], level: int
) -> None:
    assert generate(llm) == expected[0]
    llm.sleep(level)
    llm.sleep(level)  # it sleeps on
    llm.wake_up()
    llm.wake_up()
    if level == 2:
        with pytest.raises(EngineStateError, match=r"lacks weights for .* and \d+ more; give them to update_weights"):
            generate(llm)
        some = list(iterate_weights(pair[1]))
        llm.update_weights(some[:-1])
        with pytest.raises(EngineStateError, match="lacks weights for"):
            generate(llm)
        llm.update_weights(some[-1:])
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == expected[level - 1]
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)


def test_sleep_frees_the_cache_and_level_2_the_weights(pair: tuple[Path, Path]) -> None:
    with LLM(pair[0], device="cpu") as llm:
        runner = llm.engine.runner
        assert isinstance(runner, DeviceRunner)
        for level in (1, 2):
            llm.sleep(level)
            assert runner._model_runner is None
            sizes = [param.untyped_storage().nbytes() for param in runner.model.parameters()]
            assert any(sizes) == (level == 1), "on a CPU the weights are in host memory anyway"
            llm.wake_up()
            num_blocks = runner.model_runner.state.kv_cache.num_blocks
            assert num_blocks == runner.limits.num_blocks == llm.get_metrics().num_blocks


def test_calls_to_an_engine_that_sleeps_say_so(llm: LLM) -> None:
    llm.sleep()
    calls: list[Callable[[], Any]] = [
        lambda: generate(llm),
        lambda: llm.add_request([1, 2]),
        lambda: llm.stream([1, 2]),
        lambda: llm.score([1, 2], [3], use_tqdm=False),
        lambda: llm.step(),
        lambda: llm.update_weights({}),
    ]
    for call in calls:
        with pytest.raises(EngineStateError, match="this engine sleeps; call wake_up"):
            call()
    assert llm.is_finished()
    llm.wake_up()
    assert len(generate(llm)) == len(PROMPTS)


def test_weights_wake_up_first_and_take_new_values_before_the_cache_has_memory(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    """The order of TRL: weights, update, reset, cache."""
    for level in (2, 1):
        llm.sleep(level)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["weights"])
        refused = pytest.raises(
            EngineStateError, match=r"the KV cache .* sleeps; call wake_up\(tags=\['kv_cache'\]\) f"
        )
        with refused:
            generate(llm)
        llm.load_weights(iterate_weights(pair[2 - level]))
        llm.reset_prefix_cache()
        assert llm.engine.runner.sleeping_tags == {"kv_cache"}  # type: ignore[union-attr]
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm) == expected[2 - level]


def test_graphs_are_captured_once_whether_the_parts_wake_up_together_or_not(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[bool] = []
    with LLM(pair[0], device="cpu") as llm:
        monkeypatch.setattr(DeviceRunner, "_capture_graphs", lambda _, is_warm: captures.append(is_warm))
        for calls in ([None], [["weights"], ["kv_cache"]], [["kv_cache", "weights"]]):
            llm.sleep()
            captures.clear()
            for tags in calls:
                llm.wake_up(tags)
            assert captures == [True], "their kernels were loaded when the engine was made"


def test_an_engine_of_which_the_cache_sleeps_can_sleep_whole_again(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights(iterate_weights(pair[1]))
    llm.sleep(level=1)
    with pytest.raises(EngineStateError, match=r"sleeps; call wake_up, or wake_up\(tags=\['weights'\]\), before upd"):
        llm.update_weights({})
    with pytest.raises(EngineStateError, match=r"the weights sleep; call wake_up\(tags=\['weights'\]\) before, or wa"):
        llm.wake_up(tags=["kv_cache"])
    llm.wake_up()
    assert generate(llm) == expected[1]


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (
            ["weights", "scheduling"],
            "tag 'scheduling' is not supported: requests run whenever the engine is awake; use",
        ),
        (["all"], "tag 'all' is not supported: it names nothing that sleeps; use 'weights' or 'kv_cache'"),
        ("weights", "tags='weights' is no list of tags; use ['weights', 'kv_cache'], or leave it out to wake up all"),
        ([], "tags=[] is no list of tags"),
    ],
)
def test_a_tag_that_is_not_known_is_refused_by_name(llm: LLM, tags: Any, message: str) -> None:
    llm.sleep()
    with pytest.raises(ConfigError, match=re.escape(message)):
        llm.wake_up(tags)
    llm.wake_up()


def test_memory_that_is_short_for_the_cache_leaves_the_weights_awake(
    pair: tuple[Path, Path], expected: tuple[Tokens, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair[0], device="cpu") as llm:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.update_weights(iterate_weights(pair[1]))
        with monkeypatch.context() as broken:
            broken.setattr(memory, "allocate_kv_cache", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
            with pytest.raises(ConfigError, match="too little memory is free"):
                llm.wake_up(tags=["kv_cache"])
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm) == expected[1]


def test_a_level_that_is_not_known_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="level=0 is not known; use 1 to keep"):
        llm.sleep(0)


def test_nothing_that_runs_is_lost(llm: LLM, pair: tuple[Path, Path]) -> None:
    request_id = llm.add_request(PROMPTS[0], replace(GREEDY, temperature=1e-3, n=4))
    calls: list[Callable[[], Any]] = [llm.sleep, lambda: llm.update_weights(iterate_weights(pair[1]))]
    for call in calls:
        with pytest.raises(EngineStateError, match="while 1 requests are unfinished; finish them first, or abort them"):
            call()
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [(output.request_id, len(output.outputs)) for output in outputs] == [(request_id, 4)]
    assert all(len(sample.token_ids) == 8 for sample in outputs[0].outputs)


def test_what_was_aborted_does_not_keep_an_engine_awake(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS, GREEDY):
        break
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    llm.abort(request_id)
    llm.sleep()
    llm.wake_up()
    assert [output.finish_reason for output in llm.step()] == ["abort"]


def test_a_call_that_is_refused_computes_nothing(llm: LLM, pair: tuple[Path, Path]) -> None:
    def num_steps() -> int:
        metrics = llm.get_metrics()
        return metrics.num_prefill_steps + metrics.num_decode_steps

    before = num_steps()
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    calls: list[Callable[[], Any]] = [llm.sleep, lambda: llm.update_weights(iterate_weights(pair[1]))]
    for call in calls:
        with pytest.raises(EngineStateError, match="while 1 requests are unfinished"):
            call()
    assert num_steps() == before
    llm.abort(request_id)
    llm.sleep()
    llm.wake_up()
    assert num_steps() == before
    assert [output.finish_reason for output in llm.step()] == ["abort"]


def test_threads_that_generate_end_well_while_another_tries_to_update(
    llm: LLM, pair: tuple[Path, Path], expected: tuple[Tokens, Tokens]
) -> None:
    found: list[Tokens] = []
    threads = [threading.Thread(target=lambda: found.append(generate(llm))) for _ in range(3)]
    for thread in threads:
        thread.start()
    is_updated = False
    while not is_updated:
        try:
            llm.update_weights(load_file(pair[0] / "model.safetensors"))
            is_updated = True
        except EngineStateError:
            pass
    for thread in threads:
        thread.join()
    assert found == [expected[0]] * 3


def test_memory_that_is_short_leaves_the_engine_asleep(
    pair: tuple[Path, Path], expected: tuple[Tokens, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair[0], device="cpu") as llm:
        llm.sleep()
        with monkeypatch.context() as broken:
            broken.setattr(memory, "allocate_kv_cache", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
            with pytest.raises(ConfigError, match=r"too little memory is free .*none left.* and call wake_up again"):
                llm.wake_up()
        with pytest.raises(EngineStateError, match="this engine sleeps"):
            generate(llm)
        llm.wake_up()
        assert generate(llm) == expected[0]


class FakeStorage:
    """Memory of a GPU, as far as `leave_device` looks at it."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.size = 4

    def nbytes(self) -> int:
        return self.size

    def resize_(self, size: int) -> None:
        self.size = size


class FakeHostMemory:
    """Host memory that is short after so many tensors."""

    def __init__(self, num_tensors: int) -> None:
        self.num_left = num_tensors

    def empty(self, *_: Any, **__: Any) -> Any:
        if not self.num_left:
            raise RuntimeError("CUDA error: out of memory")
        self.num_left -= 1
        return self

    def untyped_storage(self) -> Any:
        return self

    def copy_(self, *_: Any, **__: Any) -> Any:
        return self


def test_copies_made_before_host_memory_ran_out_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take memory, and a later sleep at level 2 would bring these old weights back."""
    model = torch.nn.Linear(1, 1)
    model.register_buffer("table", torch.ones(1))
    storages = {id(tensor): FakeStorage() for tensor in (model.weight, model.bias, model.table)}
    monkeypatch.setattr(weights, "_storages", lambda tensors: [storages[id(tensor)] for tensor in tensors])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    held = ModelWeights(model)
    with monkeypatch.context() as short:
        short.setattr(torch, "empty", FakeHostMemory(1).empty)
        with pytest.raises(RuntimeError, match="out of memory"):
            held.leave_device(keep=True)
    assert held._on_host == {}
    assert [storage.size for storage in storages.values()] == [4] * 3
    monkeypatch.setattr(torch, "empty", FakeHostMemory(1).empty)
    held.leave_device(keep=False)
    assert [*held._on_host] == [storages[id(model.table)]]
    assert [storage.size for storage in storages.values()] == [0] * 3


def test_device_memory_that_is_short_for_a_tensor_does_not_close_an_engine_of_two_ranks(
    pair: tuple[Path, Path], expected: tuple[Tokens, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with LLM(pair[0], device="cpu", tensor_parallel_size=2) as llm:
        with monkeypatch.context() as short:
            short.setattr(torch.Tensor, "to", fail)
            with pytest.raises(torch.OutOfMemoryError):
                llm.update_weights(iterate_weights(pair[1]))
        assert generate(llm) == expected[0]
        llm.update_weights(iterate_weights(pair[1]))
        assert generate(llm) == expected[1]


@pytest.mark.parametrize("is_dict", [True, False])
def test_a_tensor_is_checked_once_before_it_is_copied_and_a_dict_once_before(
    llm: LLM, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_dict: bool
) -> None:
    checked: list[str] = []
    check = ModelWeights.check
    monkeypatch.setattr(ModelWeights, "check", lambda self, *pair: [checked.append(pair[0]), check(self, *pair)][1])
    tensors = dict(iterate_weights(pair[0]))
    llm.update_weights(tensors if is_dict else tensors.items())
    assert checked == [*tensors] * (1 + is_dict)


@pytest.mark.parametrize("rank_count", [1, 2])
def test_an_engine_that_sleeps_can_be_closed(pair: tuple[Path, Path], rank_count: int) -> None:
    llm = LLM(pair[0], device="cpu", tensor_parallel_size=rank_count)
    llm.sleep()
    llm.close()
    llm.close()
    for call in (llm.sleep, llm.wake_up, lambda: llm.update_weights({})):
        with pytest.raises(EngineClosedError):
            call()


def test_a_large_weight_is_sent_in_many_parts(tmp_path: Path) -> None:
    """The embedding has more bytes than the ring; a bfloat16 tensor with an odd number of elements is padded."""
    sizes = {"vocab_size": 20001, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 17}
    del sizes["head_dim"]
    folder = save_random(tmp_path / "large", "LlamaForCausalLM", 0, **sizes, tie_word_embeddings=False)
    new: dict[str, Tensor] = {name: tensor.flip(0).bfloat16() for name, tensor in iterate_weights(folder)}
    other = tmp_path / "other"
    other.mkdir()
    save_file(new, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    with LLM(folder, device="cpu", tensor_parallel_size=2) as llm:
        llm.update_weights(new)
        assert generate(llm) == answers(other)
