"""The search for early reads finds those that pipelining makes, and no others. The texts are MLIR, as Triton's are."""

from tests.kernels.early_reads import early_reads

WRITTEN = """
tt.func public @kernel(%x_ptr: !tt.ptr<f16>, %w_ptr: !tt.ptr<f16>, %num_turns: i32) {
  %0 = tt.addptr %w_ptr, %c64 : !tt.ptr<f16>, i32
  %1:2 = scf.for %turn = %c0 to %num_turns step %c1 iter_args(%sum = %zeros, %w_ptrs = %0) -> (f32, !tt.ptr<f16>) {
    %w = tt.load %w_ptrs : !tt.ptr<f16>
    tt.grid_dependency_wait
    %x_ptrs = tt.addptr %x_ptr, %turn : !tt.ptr<f16>, i32
    %x = tt.load %x_ptrs : !tt.ptr<f16>
    scf.yield %sum, %w_ptrs : f32, !tt.ptr<f16>
  }
  tt.return
}
"""
# As Triton 3.6 does, which takes the wait for any other instruction.
FETCHED_FIRST = """
  %first = tt.addptr %x_ptr, %c0 : !tt.ptr<f16>, i32
  %copy = ttg.async_copy_global_to_local %first, %buffer : !tt.ptr<f16>
"""
LOOP = "  %1:2 = scf.for"
PIPELINED = WRITTEN.replace(LOOP, FETCHED_FIRST + LOOP).replace(
    "tt.grid_dependency_wait", 'tt.elementwise_inline_asm "griddepcontrol.wait"'
)
WAIT = "    tt.grid_dependency_wait\n"
WAITS_ONCE = WRITTEN.replace(WAIT, "").replace(LOOP, WAIT + LOOP)


def test_what_pipelining_fetches_before_the_wait_is_found() -> None:
    assert early_reads({"ttir": WRITTEN, "ttgir": PIPELINED}, num_stages=1) == ["x_ptr"]


def test_what_is_written_before_the_wait_is_meant() -> None:
    """Such as weights, which no kernel writes."""
    assert early_reads({"ttir": WRITTEN, "ttgir": WRITTEN}, num_stages=1) == []
    assert early_reads({"ttir": WAITS_ONCE, "ttgir": WRITTEN}, num_stages=1) == ["w_ptr"]


def test_a_loop_that_waits_must_have_one_stage() -> None:
    assert early_reads({"ttir": WRITTEN, "ttgir": WRITTEN}, num_stages=3) == ["any"]
    assert early_reads({"ttir": WAITS_ONCE, "ttgir": WAITS_ONCE}, num_stages=3) == []


def test_kernels_in_gluon_are_compiled_as_they_are_written() -> None:
    assert early_reads({"ttgir": PIPELINED}, num_stages=3) == []
