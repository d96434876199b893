"""Sampled log-probabilities are those of a trainer's forward pass, in float32 on a CPU to 1e-4."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer.__main__ import main
from nanoinfer.bench import on_policy
from tests.control.test_weight_control import save_random
from tests.models.test_routed_experts import SIZES

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # figures of a GPU come from the command


def compare(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """Run the command on a few short rows, and return its figures."""
    found: dict[str, Any] = {}
    run = on_policy.run
    for name, value in (("NUM_PROMPTS", 6), ("MAX_PROMPT", 30), ("MAX_TOKENS", 16), ("BATCH", 4)):
        monkeypatch.setattr(on_policy, name, value)
    monkeypatch.setattr(on_policy, "run", lambda args: found.update(run(args)) or found)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "on-policy", *arguments])
    assert ended.value.code == 0
    assert found["dtype"] == "float32"
    return dict(found["differences"])


def test_a_model_that_is_not_there_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "on-policy", "--model", "nope"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "model='nope': there is no such folder" in shown
    assert shown.count("\n") == 1


@pytest.mark.filterwarnings("ignore:max_model_len is lowered")
@pytest.mark.parametrize("temperature", ["1", "0.6"])
def test_the_tiny_model_is_on_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    differences = compare(["--model", "tiny", "--temperature", temperature], monkeypatch)
    assert [*differences] == ["engine and trainer", "trainer, 1 and 4 rows at a time"]
    for of in differences.values():
        assert 0 < of["mean"] <= of["worst"] < 1e-4
    assert "| engine and trainer | " in capsys.readouterr().out


def test_a_model_with_experts_is_on_policy_and_its_routing_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(tmp_path / "moe", "Qwen3MoeForCausalLM", 0, **SIZES)
    differences = compare(["--model", str(folder)], monkeypatch)
    assert len(differences) == 3
    assert all(of["worst"] < 1e-4 for of in differences.values())


def test_replayed_routing_is_what_the_trainer_computes_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other experts its log-probabilities are others, so the replay does something."""
    folder = save_random(tmp_path / "moe", "Qwen3MoeForCausalLM", 0, **SIZES)
    replayed, route = on_policy._replayed, on_policy._route

    def with_others(model: Any, routing: Any) -> Any:
        return replayed(model, None if routing is None else (routing + 1) % 8)

    monkeypatch.setattr(on_policy, "_replayed", with_others)
    differences = compare(["--model", str(folder)], monkeypatch)
    assert differences["engine and trainer"]["worst"] < 1e-4
    assert differences["engine and trainer, its routing replayed"]["mean"] > 1e-3
    router = torch.nn.Identity()
    sigmoids = torch.randn(2, 4), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="Identity does not weigh its experts by a softmax, and is not replayed"):
        route(router, sigmoids, sigmoids[2])
