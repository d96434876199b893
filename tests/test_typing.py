"""What editors and type checkers see: the options of LLM, the arguments of SamplingParams, the installed package."""

import dataclasses
import inspect
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.config import EngineConfig

ROOT = Path(__file__).parent.parent

USERS_SCRIPT = """
from pathlib import Path
import torch
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams, tiny_model_path

reveal_type(SamplingParams())
reveal_type(StructuredOutputsParams(regex="a+"))
with LLM(tiny_model_path(), max_num_seqs=3, dtype="float32", trace=None) as llm:
    reveal_type(llm.generate("12+34=?", SamplingParams(temperature=0, stop="="), use_tqdm=False))
    llm.generate([1, 2, 3])
    llm.generate(["12+34=?", [1, 2, 3], {"prompt": "12+34=?"}])
    reveal_type(llm.embed("a")[0].outputs.embedding)
    reveal_type(llm.classify("a")[:1][0].outputs.probs)
    reveal_type(llm.reward("a")[0].reward)
    reveal_type(llm.score("a", ["b", "c"])[0].total)
class Column:  # a column of pandas, or its DataFrame, as pyright sees them without stubs
    def to_numpy(self, dtype: object = None) -> object: ...
llm.generate(Column())
llm.chat(Column(), priority=Column())
llm.classify("a")[0].embedding
LLM(Path("x"), dtype=torch.float32, device=torch.device("cpu"), tokenizer=Path("y"), quantization="fp8")
LLM(model="x", tokenizer=None, hf_overrides={"a": 1}, grammar_timeout=5, quantization=None)
SamplingParams(temprature=1)
SamplingParams(temperature="hot")
LLM("x", max_num_seq=3)
LLM("x", max_num_seqs="3")
LLM("x", dtype="flot32")
LLM("x", quantization="fp4")
LLM("x", device=0)
LLM("x", "float32")
llm.generate(3)
"""
WHAT_MYPY_SAYS = [
    (6, 'Revealed type is "nanoinfer.sampling_params.SamplingParams"'),
    (7, 'Revealed type is "nanoinfer.structured_outputs.StructuredOutputsParams"'),
    (9, 'Revealed type is "nanoinfer.outputs.RequestOutputs"'),
    (12, "floating["),
    (13, "floating["),
    (14, "float | numpy.ndarray["),
    (15, 'Revealed type is "float"'),
    (20, 'Invalid self argument "PoolingRequestOutput[ClassificationOutput]" to attribute function "embedding"'),
    (23, 'Unexpected keyword argument "temprature" for "SamplingParams"'),
    (24, 'Argument "temperature" to "SamplingParams" has incompatible type "str"; expected "float"'),
    (25, 'Unexpected keyword argument "max_num_seq" for "LLM"'),
    (26, 'Argument "max_num_seqs" to "LLM" has incompatible type "str"; expected "int"'),
    (27, 'Argument "dtype" to "LLM" has incompatible type "Literal[\'flot32\']"'),
    (28, 'Argument "quantization" to "LLM" has incompatible type "Literal[\'fp4\']"'),
    (29, 'Argument "device" to "LLM" has incompatible type "int"'),
    (30, 'Too many positional arguments for "LLM"'),
    (31, 'Argument 1 to "generate" of "LLM" has incompatible type "int"'),
]


def test_notebooks_complete_the_options_of_llm_in_their_order() -> None:
    assert [*inspect.signature(LLM).parameters] == [field.name for field in dataclasses.fields(EngineConfig)]
    assert inspect.signature(LLM).parameters["max_num_seqs"].default == 512


def test_options_are_kept_as_type_checkers_read_them() -> None:
    """Such a field has two types: what may be given, and what it is made into."""
    config = EngineConfig(Path("x"), dtype=torch.float32, device=torch.device("cpu"), tokenizer=Path("y"))
    assert [config.model, config.dtype, config.device, config.tokenizer] == ["x", "float32", "cpu", "y"]


def test_mypy_finds_a_users_mistakes_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy comes with nanoinfer[dev]")
    script = tmp_path / "script.py"
    script.write_text(USERS_SCRIPT)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--hide-error-context", "--no-error-summary", script.name]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout.splitlines()
    found = [line for line in found if '"LLM" defined in' not in line]
    assert len(found) == len(WHAT_MYPY_SAYS), found
    for line, (number, said) in zip(found, WHAT_MYPY_SAYS, strict=True):
        assert line.startswith(f"script.py:{number}: ")
        assert said in line


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of what a build reads: it writes beside its sources."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "nanoinfer", tmp_path / "nanoinfer", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installed_package_is_found_by_type_checkers_with_its_types(kind: str, copied: Path) -> None:
    """An import hook, which setuptools installs for some layouts, is followed by Python only: they need a path."""
    pytest.importorskip("setuptools", minversion="77", reason="what builds the package is not installed here")
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=copied, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(copied / built.stdout.splitlines()[-1]) as wheel:
        names = wheel.namelist()
        if kind == "wheel":
            assert {"nanoinfer/py.typed", "nanoinfer/control/run_trace.html"} <= {*names}
            assert [name for name in names if name.endswith("tiny-qwen3/model.safetensors")]
            assert not [name for name in names if name.startswith("tests")]
        else:
            [path] = [name for name in names if name.endswith(".pth")]
            assert Path(wheel.read(path).decode().strip()) == copied
            assert (copied / "nanoinfer" / "py.typed").exists()
