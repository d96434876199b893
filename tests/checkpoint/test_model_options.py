"""Which model: the options revision, tokenizer, download_dir and hf_overrides, from `LLM` down to the hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nanoinfer import LLM, ConfigError, ModelError, NanoinferError, RequestError, SamplingParams, tiny_model_path
from nanoinfer.__main__ import main
from nanoinfer.models import SUPPORTED

LONG = SamplingParams(temperature=0, max_tokens=40)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
Calls = list[tuple[str, dict[str, Any]]]


def change_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A hub with org/model, which has no tokenizer, and org/words, which has nothing else; what it was asked for."""
    for name in ("org/model", "org/words"):
        shutil.copytree(tiny_model_path(), tmp_path / name)
    for path in (tmp_path / "org/model").glob("tokenizer*"):
        path.unlink()
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (tmp_path / "org/words" / name).unlink()
    template = "ask: {{messages[0].content}}"
    change_json(tmp_path / "org/words/tokenizer_config.json", eos_token="7", chat_template=template)
    calls: Calls = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path / "org")  # where "org/model" is no folder
    return calls


def load(model: object, **options: Any) -> LLM:
    return LLM(model, device="cpu", num_kvcache_blocks=16, **options)  # type: ignore[arg-type]


def refusal(**options: Any) -> str:
    """The message with which the tiny model is refused with these options."""
    with pytest.raises(NanoinferError) as error:
        load(tiny_model_path(), **options).close()
    assert isinstance(error.value, ValueError)
    return str(error.value)


# --- the hub ---


def test_a_revision_is_of_the_model_and_the_folder_of_downloads_of_everything(hub: Calls, tmp_path: Path) -> None:
    with load("org/model", revision="v2", download_dir=tmp_path / "cache", tokenizer="org/words") as llm:
        assert (llm.config.revision, llm.config.download_dir) == ("v2", str(tmp_path / "cache"))
        assert repr(llm).startswith("LLM('org/model', cpu, float32, ")
    [(model, its), (tokenizer, others)] = hub
    assert (model, its["revision"], its["cache_dir"]) == ("org/model", "v2", str(tmp_path / "cache"))
    assert (tokenizer, others["revision"], others["cache_dir"]) == ("org/words", None, str(tmp_path / "cache"))
    assert "*.safetensors" in its["allow_patterns"]
    assert "*.safetensors" not in others["allow_patterns"]


def test_by_default_the_hub_is_asked_for_its_main_branch_and_its_own_cache(hub: Calls) -> None:
    load("org/model").close()
    [(_, options)] = hub
    assert (options["revision"], options["cache_dir"]) == (None, None)


def test_the_models_own_name_for_the_tokenizer_means_the_same_revision(hub: Calls, tmp_path: Path) -> None:
    shutil.copy(tiny_model_path() / "tokenizer.json", tmp_path / "org/model")
    load("org/model", tokenizer="org/model", revision="v2").close()
    assert [(name, options["revision"]) for name, options in hub] == [("org/model", "v2")]


def test_a_revision_of_a_local_folder_is_refused_and_none_of_a_tokenizers_folder_is_meant(hub: Calls) -> None:
    assert "revision='v2' is of a model on the hub, and model=" in refusal(revision="v2")
    load("org/model", revision="v2", tokenizer=tiny_model_path()).close()


# --- the tokenizer ---


def test_texts_templates_and_stop_ids_are_those_of_the_tokenizer_and_the_rest_is_the_models(
    hub: Calls, tmp_path: Path
) -> None:
    with load(tiny_model_path()) as own, load("org/model", tokenizer=tmp_path / "org/words") as llm:
        assert llm.tokenizer.eos_token == "7" != own.tokenizer.eos_token
        assert llm.encode("3 and 4") == own.encode("3 and 4")
        [output] = llm.chat([{"role": "user", "content": "2 + 2?"}], GREEDY, use_tqdm=False)
        assert llm.decode(output.prompt_token_ids) == "ask: 2 + 2?"
        primes = own.tokenizer.apply_chat_template(
            [{"role": "user", "content": "list all prime numbers within 100"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        [mine], [theirs] = (one.generate([own.encode(primes)], LONG, use_tqdm=False) for one in (own, llm))
        assert mine.text.startswith("2, 3, 5, 7, 11")
        assert (theirs.text, theirs.finish_reason) == ("2, 3, 5, ", "stop")
        assert llm.default_sampling_params == own.default_sampling_params


def test_a_tokenizer_that_is_none_is_refused_by_name(hub: Calls, tmp_path: Path) -> None:
    for name in ("org/model", str(tmp_path / "org/model")):
        assert f"tokenizer={name!r} has none of tokenizer.json, " in refusal(tokenizer=name)
    with pytest.raises(ModelError, match=r"tokenizer='org/model' has none of tokenizer\.json"):
        load("org/model", tokenizer="org/model")
    assert "tokenizer='../nowhere': there is no such folder; give one, or a hub id" in refusal(tokenizer="../nowhere")
    file = tmp_path / "org/words/tokenizer.json"
    assert refusal(tokenizer=file) == f"tokenizer={str(file)!r} is a file; give the folder that holds it"


def test_a_tokenizer_of_more_tokens_than_the_model_loads(hub: Calls, tmp_path: Path) -> None:
    path = tmp_path / "org/words/tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 1024, "content": "<new>"})
    path.write_text(json.dumps(content))
    with load("org/model", tokenizer="org/words") as llm, pytest.raises(RequestError, match="'<new>'"):
        llm.generate("2<new>")


# --- overrides of config.json ---


def test_overrides_change_the_model_and_its_longest_sequence() -> None:
    overrides = {"max_position_embeddings": 128, "rope_theta": 3.0}
    with load(tiny_model_path(), hf_overrides=overrides) as llm, load(tiny_model_path()) as own:
        assert llm.config.hf_overrides == overrides
        assert llm.max_model_len == 128 < own.max_model_len
        prompt = [*range(5, 60)]
        scores = [one.score([prompt], [[9, 10]], use_tqdm=False)[0].total for one in (llm, own)]
        assert scores[0] != pytest.approx(scores[1], abs=1e-3), "another rotation, other logits"
        overrides["rope_theta"] = 4.0
        assert llm.config.hf_overrides["rope_theta"] == 3.0, "the options never change"


def test_all_ranks_have_the_overrides() -> None:
    options: dict[str, Any] = {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}}
    prompts = [[*range(5, 60)], [7, 8, 9]]
    tokens = []
    for size in (1, 2):
        with load(tiny_model_path(), tensor_parallel_size=size, **options) as llm:
            assert llm.max_model_len == 2048
            tokens.append([output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert tokens[0] == tokens[1]


def test_a_misspelt_override_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    shutil.copy(tiny_model_path() / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"hf_overrides has rope_thta=5\.0, which .* did you mean 'rope_theta'"):
        load(tmp_path, hf_overrides={"rope_thta": 5.0})


def test_code_of_the_checkpoint_stays_refused() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'trust_remote_code'; nanoinfer does not support it"):
        load(tiny_model_path(), trust_remote_code=True)


# --- the command line ---


def run_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str) -> tuple[object, str]:
    """The exit code of a job of one line with these options, and what it printed."""
    (tmp_path / "in").write_text('{"prompt": [5, 6], "max_tokens": 2, "temperature": 0}\n')
    paths = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", "--model", str(tiny_model_path()), "--device", "cpu", *paths, *options])
    return ended.value.code, capsys.readouterr().err


def test_a_job_goes_on_with_the_same_overrides_and_tokenizer_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--tokenizer", str(tiny_model_path()), "--hf-overrides", '{"rope_theta": 5, "rms_norm_eps": 1e-5}']
    same = ["--tokenizer", f"{tiny_model_path()}/", "--hf-overrides", '{"rms_norm_eps": 1e-5, "rope_theta": 5}']
    assert run_batch(capsys, tmp_path, *options)[0] == 0
    assert run_batch(capsys, tmp_path, *same, "--download-dir", str(tmp_path))[0] == 0
    for others in ([], options[:2], options[2:], [*options[:3], '{"rope_theta": 5}'], [*options, "--revision", "v2"]):
        code, said = run_batch(capsys, tmp_path, *others)
        assert code == 2
        assert "was made with other settings: " in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{rope_theta: 5}", "argument --hf-overrides: '{rope_theta: 5}' is no JSON (Expecting property name"),
        ("[1]", "argument --hf-overrides: '[1]' is no JSON object; give one such as '{\"name\": 1}'"),
        ('{"rope_thta": 5}', "nanoinfer: hf_overrides has rope_thta=5, which changes nothing"),
    ],
)
def test_overrides_that_are_no_json_object_or_change_nothing_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: str, message: str
) -> None:
    code, said = run_batch(capsys, tmp_path, "--hf-overrides", given)
    assert code == 2
    assert message in said
    assert len(said.splitlines()) == 1


def test_every_architecture_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.split()
    assert {*listed} >= {*SUPPORTED, "GPTNeoXForCausalLM", "DistilBertModel"}
    assert {*listed}.isdisjoint({"Lfm2ForCausalLM", "FalconForCausalLM", "MobileBertModel"})
    assert len({name for name in listed if name[0].isupper()}) == len([name for name in listed if name[0].isupper()])
