"""`nanoinfer chat`: what it answers, what it remembers, and what Ctrl-C and Ctrl-D do."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM
from nanoinfer.__main__ import main

SUM, SPELL = "What is 312 + 48?", "Spell river backwards."
ANSWERS = {SUM: "312 + 48 = 360", SPELL: "r-e-v-i-r"}
GREEDY = ["--model", "tiny", "--device", "cpu", "--temperature", "0"]


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *options: object) -> int:
    """The exit code of a chat in which these lines are piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with pytest.raises(SystemExit) as ended:
        main(["chat", *GREEDY, *map(str, options)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that are streamed."""
    prompts: list[str] = []
    stream = LLM.stream

    def remember(llm: LLM, token_ids: Any, *rest: Any) -> Any:
        prompts.append(llm.decode(token_ids, skip_special_tokens=False))
        return stream(llm, token_ids, *rest)

    monkeypatch.setattr(LLM, "stream", remember)
    return prompts


def test_lines_that_are_piped_in_are_answered_one_by_one() -> None:
    command = [sys.executable, "-m", "nanoinfer", "chat", *GREEDY]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    shown = subprocess.run(
        command, input=f"{SUM}\n\n{SPELL}", env=environment, capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0
    assert shown.stdout == f"{ANSWERS[SUM]}\n{ANSWERS[SPELL]}\n"
    assert shown.stderr.startswith("LLM('tiny', cpu, ")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_line_that_is_not_utf_8_is_named_and_the_next_is_answered(locale: str) -> None:
    command = [sys.executable, "-m", "nanoinfer", "chat", *GREEDY]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "LC_ALL": locale}
    shown = subprocess.run(
        command, input=b"caf\xe9?\n" + SUM.encode(), env=environment, capture_output=True, timeout=120
    )
    assert shown.returncode == 3, "one line has no answer"
    assert shown.stdout.decode() == f"{ANSWERS[SUM]}\n"
    assert b"nanoinfer: 'caf\\udce9?' is not UTF-8; save the input as UTF-8" in shown.stderr


@pytest.mark.parametrize("is_utf_8", ["0", "1"])
def test_utf_8_is_read_and_written_in_a_locale_without_it(is_utf_8: str) -> None:
    template = json.dumps({"chat_template": "{{ messages[0].content }}{{ messages[1].content }}"})
    options = ["--system", "“ü”", "--chat-template-kwargs", template, "--max-tokens", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "LC_ALL": "C"}
    environment |= {"PYTHONUTF8": is_utf_8, "PYTHONCOERCECLOCALE": "0"}
    code = (
        "import nanoinfer, nanoinfer.__main__ as m\n"
        "from types import SimpleNamespace as Chunk\n"
        "say = lambda llm, ids, params: (Chunk(text=llm.decode(ids), finish_reason='stop') for _ in '1')\n"
        "nanoinfer.LLM.stream = say\n"
        "m.main()"
    )
    command = [sys.executable, "-c", code, "chat", *GREEDY, *options]
    given = "\ufeff中文?\n/quit\nnever read".encode()
    shown = subprocess.run(command, input=given, env=environment, capture_output=True, timeout=120)
    assert (shown.stdout.decode(), shown.returncode) == ("“ü”中文?\n", 0)


@pytest.mark.parametrize("given", [["tiny"], ["--model", "tiny"], ["--temperature", "0", "tiny"]])
def test_the_model_may_be_named_without_an_option(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    with pytest.raises(SystemExit) as ended:
        main(["chat", *given, "--device", "cpu"])
    assert ended.value.code == 0


@pytest.mark.parametrize("given", [[], ["tiny", "--model", "tiny"]])
def test_a_chat_is_with_one_model(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", *given])
    assert ended.value.code == 2
    assert "nanoinfer chat: name one model, such as: nanoinfer chat tiny; see" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["/quit", "/exit", "/bye"])
def test_a_word_leaves_the_chat(word: str, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    assert talk(monkeypatch, f"{word}\n{SUM}\n") == 0
    assert asked == []


def test_a_conversation_is_remembered_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    assert talk(monkeypatch, f"{SUM}\n{SPELL}\n/reset\n{SUM}\n", "--system", "Be brief.") == 0
    begun = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert all(prompt.startswith(begun) for prompt in asked)
    assert [SUM in prompt and ANSWERS[SUM] in prompt for prompt in asked] == [False, True, False]
    assert SPELL not in asked[2]
    assert capsys.readouterr().out.splitlines()[0] == ANSWERS[SUM]


def test_what_is_no_command_is_named_and_a_path_is_a_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    assert talk(monkeypatch, "/help\n/usr/bin is what?\n", "--max-tokens", 3) == 0
    assert len(asked) == 1
    shown = capsys.readouterr().err
    assert "/help is no command: /reset forgets the conversation, Ctrl-C stops an answer, /quit or Ctrl-D " in shown
    assert "(cut by --max-tokens or the model's limit)" in shown


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    stream = LLM.stream

    def interrupt(*given: Any) -> Iterator[Any]:
        for number, chunk in enumerate(stream(*given)):
            if number == 3 and len(asked) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield chunk

    monkeypatch.setattr(LLM, "stream", interrupt)
    assert talk(monkeypatch, f"{SUM}\n{SPELL}\n") == 0
    shown = capsys.readouterr()
    begun, _ = shown.out.splitlines()
    assert 0 < len(begun) < len(ANSWERS[SUM])
    assert ANSWERS[SUM].startswith(begun)
    assert "(stopped)" in shown.err
    assert f"assistant\n{begun}<|im_end|>" in asked[1]


def test_ctrl_c_at_the_prompt_drops_the_line_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: list[Any] = [KeyboardInterrupt, SUM, EOFError]

    def read(prompt: str) -> str:
        line = typed.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert talk(monkeypatch, "") == 0
    assert capsys.readouterr().out == f"\n{ANSWERS[SUM]}\n"


def test_a_question_that_cannot_be_served_is_no_part_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    assert talk(monkeypatch, f"{'long ' * 100}\n{SUM}\n", "--max-model-len", 64) == 3
    shown = capsys.readouterr()
    assert shown.out == f"{ANSWERS[SUM]}\n"
    assert "exceeds max_model_len=64" in shown.err
    assert "; /reset forgets the conversation" in shown.err
    assert "long" not in asked[1]


def test_the_template_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    arguments = json.dumps({"chat_template": "{{ word }}", "word": "plum"})
    assert talk(monkeypatch, f"{SUM}\n", "--chat-template-kwargs", arguments, "--max-tokens", 1) == 0
    assert asked == ["plum"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nope"], "nanoinfer: model='nope': there is no such folder; give one, or a hub id"),
        (["--top-p", 2], "nanoinfer: top_p=2.0 must be above 0 and at most 1"),
        (["--max-num-seqs", 0], "nanoinfer: max_num_seqs=0 must be a whole number of at least 1"),
        (["--runner", "pooling"], "nanoinfer: Qwen3ForCausalLM has no language-model head here"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[object], message: str
) -> None:
    assert talk(monkeypatch, "", *options) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message)
    assert shown.count("\n") == 1


def test_a_model_without_a_chat_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], random_checkpoint: Callable[..., Path]
) -> None:
    assert talk(monkeypatch, SUM, "--model", random_checkpoint()) == 2
    assert "has no chat template; take a model that is made for chats, or use run-batch" in capsys.readouterr().err
