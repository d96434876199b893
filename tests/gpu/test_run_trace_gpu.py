"""What a step took on a GPU, by two CUDA events around its work."""

import pytest

from nanoinfer import LLM, SamplingParams, StepEvent, tiny_model_path

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"overlap": False}], ids=str)
def test_gpu_times_are_those_of_the_steps(options: dict) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(tiny_model_path(), device="cuda", **options) as llm:
        llm.generate(["What is 2"] * 8, params, use_tqdm=False)  # compiles
        llm.reset_prefix_cache()
        events: list[StepEvent] = []
        end = llm.on_step(events.append)
        outputs = llm.generate(["What is 2"] * 8, params, use_tqdm=False)
        end()
        again = llm.generate(["What is 2"] * 8, params, use_tqdm=False)
    assert len(events) == 40
    assert [output.token_ids for output in outputs] == [output.token_ids for output in again]
    assert all(event.gpu_seconds is not None and event.gpu_seconds > 0 for event in events)
    whole = events[-1].arrived - events[0].started
    gpu = sum(event.gpu_seconds or 0 for event in events)
    assert 0.05 * whole < gpu < 1.02 * whole, "steps do not overlap on the GPU"
