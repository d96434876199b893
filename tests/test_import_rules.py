"""Who may import whom, read from the sources; and what importing the package must not bring in."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.models import SUPPORTED

PACKAGE = Path(nanoinfer.__file__).parent

# Each part may import itself and the parts that its line names. Parts are folders, and the files of the top folder.
EVERYBODY = {
    "errors",
    "vllm_names",
    "config",
    "device",
    "garbage",
    "outputs",
    "metrics",
    "flat_logprobs",
    "structured_outputs",
    "responses",
    "speculative_config",
    "option_fields",
    "sampling_params",
    "pooling_params",
    "pooling_outputs",
    "token_ids",
    "integers",
    "checkpoint",
    "lora.lora_request",
}
STEP_DATA = {
    "engine.packet",
    "engine.interfaces",
    "engine.cache_groups.specs",
    "engine.row_options",
    "engine.token_masks",
    "engine.hidden_states_request",
    "engine.side_outputs",
}  # what engine and runner tell each other
PLANNERS = EVERYBODY - {"device", "checkpoint"}  # what plans without PyTorch
MAY_IMPORT: dict[str, set[str]] = {
    "before_torch": set(),
    "errors": set(),
    "vllm_names": {"errors"},
    "config": {"errors", "vllm_names", "structured_outputs", "responses", "speculative_config"},
    "device": {"errors"},
    "step_threads": {"device"},
    "garbage": set(),
    "outputs": {"errors"},
    "metrics": {"outputs"},
    "flat_logprobs": {"outputs"},
    "structured_outputs": {"errors"},
    "speculative_config": {"errors"},
    "option_fields": {"errors"},
    "sampling_params": {"errors", "vllm_names", "structured_outputs", "option_fields"},
    "pooling_params": {"errors", "option_fields"},
    "pooling_outputs": {"outputs"},
    "token_ids": set(),
    "integers": set(),
    "checkpoint": {"errors", "config", "device"},
    "responses": {"errors", "sampling_params", "structured_outputs"},
    "text": EVERYBODY,
    "constraints": PLANNERS | {"text", "progress", "engine.token_masks", "engine.stopping"},
    "engine": PLANNERS | {"text"},
    "speculation": PLANNERS | {"engine"},
    "ops": EVERYBODY,
    "distributed": EVERYBODY | {"ops"},
    "quantization": EVERYBODY | {"ops", "distributed"},
    "caches": EVERYBODY | {"ops", "distributed", "engine.cache_groups.specs"},
    "layers": EVERYBODY | {"caches", "quantization", "ops", "distributed"},
    "models": EVERYBODY | {"caches", "layers", "quantization", "ops", "distributed", "step_threads"},
    "lora": EVERYBODY | STEP_DATA | {"engine", "sampling", "models", "layers", "ops"},
    "sampling": EVERYBODY | STEP_DATA | {"models", "layers", "ops", "distributed"},
    "runner": EVERYBODY
    | STEP_DATA
    | {"sampling", "models", "layers", "caches", "ops", "distributed", "step_threads"}
    | {"lora.adapter_config", "lora.adapter_slots", "lora.adapter_weights"},
    "images": EVERYBODY | {"text", "engine"},
    "executor": EVERYBODY | STEP_DATA | {"engine.interrupts", "runner", "distributed"},
    "progress": EVERYBODY,
    "scoring": EVERYBODY | {"text", "engine", "progress"},
    "pooling_calls": EVERYBODY | {"engine", "text", "progress", "aio"},
    "control": EVERYBODY | {"text", "engine", "lora.lora_methods"},
    "aio": EVERYBODY | {"engine", "text", "progress"},
    "loading": EVERYBODY
    | {"constraints", "control", "engine", "executor", "lora", "runner", "models", "speculation", "text"}
    | {"images", "pooling_calls.pooling_steps"},
    "replicas": EVERYBODY
    | {"constraints", "control", "engine", "executor", "images", "runner", "text", "loading", "lora.registry"},
    "llm": EVERYBODY
    | {"control.weight_methods", "engine", "text", "progress", "scoring", "aio", "loading", "replicas"}
    | {"before_torch", "pooling_calls"},
    "__init__": EVERYBODY | {"llm"},
    "batch": EVERYBODY | {"llm", "engine", "text", "progress", "loading", "constraints", "pooling_calls"},
    "bench": EVERYBODY
    | {
        *nanoinfer.__all__,
        "__version__",
        "cli",
        "control",
        "engine",
        "executor.shm_ring",
        "constraints",
        "replicas",
        "text",
        "models",
        "caches",
        "layers",
        "lora",
        "quantization",
        "ops",
        "distributed",
    },
    "integrations": EVERYBODY
    | {*nanoinfer.__all__, "llm", "engine", "executor", "text", "progress", "batch", "constraints.thoughts"}
    | {"lora.adapter_weights"},
    "cli": EVERYBODY,
    "terminal_chat": EVERYBODY | {*nanoinfer.__all__, "text"},
    "__main__": EVERYBODY
    | {*nanoinfer.__all__, "__version__", "cli", "terminal_chat", "batch", "bench", "models"}
    | {"engine.interrupts"},
}
WITHOUT_TORCH = {"constraints", "engine", "config", "option_fields", "sampling_params"}
WITHOUT_TORCH |= {"outputs", "metrics", "flat_logprobs", "errors", "vllm_names", "cli", "token_ids"}
CUDA_ONLY = (
    "distributed.copy_engines",
    "layers.attention.flash_attn",
    "layers.attention.latent_triton",
    "layers.attention.triton",
)


def module_name(path: Path) -> str:
    """nanoinfer/engine/packet.py -> engine.packet; nanoinfer/engine/__init__.py -> engine."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def lies_in(name: str, place: str) -> bool:
    """Whether `name` is the module or folder `place`, or something in it."""
    return name == place or name.startswith(f"{place}.")


def imported_names(source: str) -> Iterator[str]:
    """The full dotted name of everything that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(name: str, source: str) -> list[str]:
    part = name.partition(".")[0]
    allowed = MAY_IMPORT[part] | {part}
    ours = [found.removeprefix("nanoinfer.") for found in imported_names(source) if lies_in(found, "nanoinfer")]
    return [found for found in ours if not any(lies_in(found, place) for place in allowed)]


@pytest.mark.parametrize("name", [name for name in MODULES if not lies_in(name, "assets")])
def test_imports_go_down_from_part_to_part(name: str) -> None:
    assert forbidden_imports(name, MODULES[name].read_text(encoding="utf-8")) == []


def test_no_two_files_have_one_name_but_those_of_operations() -> None:
    """A file is found by its name alone."""
    folders: dict[str, set[str]] = {}
    for path in MODULES.values():
        folders.setdefault(path.name, set()).add(path.parent.name)
    twice = {name for name, found in folders.items() if len(found) > 1}
    assert twice <= {"__init__.py", "spec.py", "triton.py", "hopper.py", "cpu.py"}


def imported_parts(name: str) -> set[str]:
    """The parts that a module imports something of, anywhere in it, also only for its types."""
    parts = {name.partition(".")[0] for name in MODULES}
    found = [full.split(".") for full in imported_names(MODULES[name].read_text(encoding="utf-8"))]
    ours = [path[1] if path[1] in parts else "__init__" for path in found if path[0] == "nanoinfer" and len(path) > 1]
    return {*ours} - {name.partition(".")[0]}


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of parts each of which imports all others of its set, directly or by way of others."""

    def reached(part: str) -> set[str]:
        found: set[str] = set()
        left = [part]
        while left:
            new = imports.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    reach = {part: reached(part) for part in imports}
    return {
        frozenset(other for other in reach[part] if part in reach.get(other, set()))
        for part in reach
        if part in reach[part]
    }


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    imports: dict[str, set[str]] = {}
    for name in MODULES:
        if not lies_in(name, "assets"):
            imports.setdefault(name.partition(".")[0], set()).update(imported_parts(name))
    assert circles(imports) == set()


def test_a_circle_is_found_however_long_it_is() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == {frozenset("abc")}
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()


def names_behind(name: str) -> set[str]:
    """All that a module imports as it is loaded, by statements of its own level, or by way of our other modules."""
    names: set[str] = set()
    left, seen = [name], {name}
    while left:
        tree = ast.parse(MODULES[left.pop()].read_text(encoding="utf-8"))
        at_load = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        found = {*imported_names(ast.unparse(at_load))}
        names |= found
        ours = {full.removeprefix("nanoinfer.") for full in found if lies_in(full, "nanoinfer")}
        new = {module for module in MODULES if any(lies_in(one, module) for one in ours)} - seen - {"__init__"}
        seen |= new
        left += new
    return names


def test_imports_are_followed_through_other_modules() -> None:
    assert "torch" in names_behind("loading")
    assert not any(lies_in(full, "torch") for full in imported_names(MODULES["loading"].read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", [name for name in MODULES if any(lies_in(name, part) for part in WITHOUT_TORCH)])
def test_the_planning_half_of_the_engine_does_without_torch(name: str) -> None:
    names = {*imported_names(MODULES[name].read_text(encoding="utf-8"))} | names_behind(name)
    assert [imported for imported in names if lies_in(imported, "torch")] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name != "llm"])
def test_nothing_reads_private_members_of_an_llm(name: str) -> None:
    assert re.findall(r"\bllm\._[a-z]\w*", MODULES[name].read_text(encoding="utf-8")) == []


def test_nothing_imports_the_benchmark_but_the_command_line() -> None:
    importers = [name for name, allowed in MAY_IMPORT.items() if "bench" in allowed]
    assert importers == ["__main__"]


def test_nothing_imports_the_integrations() -> None:
    assert [name for name, allowed in MAY_IMPORT.items() if "integrations" in allowed] == []


@pytest.mark.parametrize(
    ("name", "source", "forbidden"),
    [
        ("errors", "import nanoinfer.config", ["config"]),
        ("layers.linear", "from nanoinfer.engine.packet import pack", ["engine.packet.pack"]),
        ("layers.linear", "def f():\n    import nanoinfer.engine", ["engine"]),
        ("runner.memory", "from nanoinfer.engine import scheduler", ["engine.scheduler"]),
        ("runner.memory", "from nanoinfer.engine.packet import pack", []),
        ("checkpoint.loader", "from nanoinfer.errors_of_others import x", ["errors_of_others.x"]),
    ],
)
def test_the_rules_find_what_breaks_them(name: str, source: str, forbidden: list[str]) -> None:
    assert forbidden_imports(name, source) == forbidden


def run_python(source: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Each of these takes half a second or more to import. torch._dynamo alone brings in the three after it.
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.attention.varlen",
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.models.auto.tokenization_auto",
    "flash_attn",
    "triton",
    "sklearn",
    "scipy",
    "pandas",
    "torchvision",
}
FIRST_ANSWER = """
import logging, sys, time
import nanoinfer
print(*sys.modules)
[getattr(nanoinfer, name) for name in nanoinfer.__all__ if name != "LLM"]
started = time.perf_counter()
from nanoinfer import LLM
import_seconds = time.perf_counter() - started
print(*(after_import := {*sys.modules}))
from concurrent.futures import ThreadPoolExecutor
from nanoinfer.text.tokenizer import load_tokenizer
ThreadPoolExecutor(1).submit(load_tokenizer, nanoinfer.tiny_model_path()).result()
print(*{*sys.modules} - after_import)
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with LLM(nanoinfer.tiny_model_path(), device="cpu") as llm:
    messages = [{"role": "user", "content": "12+34=?"}]
    [output] = llm.chat(messages, nanoinfer.SamplingParams(max_tokens=2), use_tqdm=False)
print(*sys.modules)
from nanoinfer.llm import LLM
LLM(nanoinfer.tiny_model_path(), device="cpu").close()
print(import_seconds)
"""


@pytest.fixture(scope="module")
def first_answer() -> list[str]:
    return run_python(FIRST_ANSWER).splitlines()


def test_a_first_answer_imports_the_page_of_its_architecture_and_no_other(first_answer: list[str]) -> None:
    pages = {path.rpartition(".")[0] for path in SUPPORTED.values()}
    assert {page for page in pages if f"nanoinfer.models.{page}" in first_answer[4].split()} == {"qwen"}


def test_a_first_answer_brings_in_no_heavy_library(first_answer: list[str]) -> None:
    """What PyTorch itself imports counts too, hence the high limits: they find a library more, not a module."""
    package, names, tokenizer, _, answer, *_ = (line.split() for line in first_answer)
    assert {"torch", "transformers", "tokenizers", "triton", "numpy", "tqdm"}.isdisjoint(package)
    assert len(package) < 150
    assert "torch" in names, "LLM is imported when it is asked for"
    assert {"transformers", "tokenizers"}.isdisjoint(names), "they are imported beside the weights"
    assert len(names) < 1600
    assert not [name for name in tokenizer if name.startswith("torch")], "two threads would import PyTorch"
    assert HEAVY.isdisjoint(answer)
    assert len(answer) < 2200


def test_the_first_engine_logs_the_seconds_of_the_imports_and_no_later_one_does(first_answer: list[str]) -> None:
    first, second, seconds = first_answer[3], first_answer[5], float(first_answer[6])
    [logged] = re.findall(r"\(imports (.*?) s,", first)
    assert seconds - 0.3 < float(logged) <= seconds + 0.05, "all but what Python does around the import"
    assert "imports" not in second
    ready = [float(re.findall(r"ready in (.*?) s", line)[0]) for line in (first, second)]
    assert ready[0] >= float(logged)
    assert ready[1] < ready[0] - float(logged) / 2


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", {"GOMP_SPINCOUNT": "20000"}),
        ("os.environ['OMP_WAIT_POLICY'] = 'active'", {"OMP_WAIT_POLICY": "active"}),
        ("import torch", {}),
    ],
)
def test_cpu_threads_stop_spinning_early_unless_the_user_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch, before: str, expected: dict[str, str]
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    found = f"{{name: os.environ[name] for name in {names} if name in os.environ}}"
    assert ast.literal_eval(run_python(f"import os\n{before}\nfrom nanoinfer import LLM\nprint({found})")) == expected


def test_a_name_that_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nanoinfer' has no attribute 'LLMs'"):
        nanoinfer.LLMs  # noqa: B018


def test_every_module_that_a_string_names_exists() -> None:
    """A misspelt one would be missed only on a GPU, or pass for a package that is not installed."""
    strings = {
        node.value.removeprefix("nanoinfer."): path
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"nanoinfer(\.[a-z_0-9]+)+", node.value)
    }
    assert "layers.attention.flash_attn" in strings
    strings.pop("replace_each_byte")  # the name of an error handler of codecs
    assert {name: path for name, path in strings.items() if name not in MODULES} == {}


def test_every_module_of_the_cpu_path_imports_without_triton_and_flash_attn() -> None:
    """Two of them run, too: an operator that has a kernel, and the sampler."""
    on_cpu = [
        name
        for name in MODULES
        if name != "__init__"
        and not name.startswith(("assets", "integrations.", *CUDA_ONLY))
        and not (name.startswith("ops.") and name.rpartition(".")[2].startswith(("triton", "hopper")))
    ]
    assert "runner.model_runner" in on_cpu
    lines = [
        "import sys",
        "sys.modules['triton'] = sys.modules['flash_attn_2_cuda'] = None",
        *(f"import nanoinfer.{name}" for name in on_cpu),
        "import torch",
        "one = torch.ones(1, 2)",
        "gated = nanoinfer.ops.activations.spec.silu_and_mul(one)",
        "ids = nanoinfer.ops.gumbel_max.spec.sample(one, one[0, :1], one[0, :1].long(), one[0, :1].int())",
        "print(gated.shape, ids.shape)",
    ]
    assert run_python("\n".join(lines)) == "torch.Size([1, 1]) torch.Size([1])"


def test_tests_for_a_gpu_can_be_imported_without_one() -> None:
    """Where there is none, pytest leaves them out, and would not see a name that is no longer there."""
    for path in sorted((PACKAGE.parent / "tests" / "gpu").glob("test_*.py")):
        import_module(f"tests.gpu.{path.stem}")
