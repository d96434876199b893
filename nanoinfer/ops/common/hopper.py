"""What the kernels in Gluon for Hopper GPUs share: copies into shared memory, and how it is laid out."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# What Triton 3.6 calls otherwise than 3.9.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # in bulk, a whole tile (TMA)
gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # each 16 bytes
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=2)  # rows of 128 bytes, as the tensor cores read them
MAX_REGISTERS = 168  # of a thread at the start, where 3 groups of 128 threads share 64k
