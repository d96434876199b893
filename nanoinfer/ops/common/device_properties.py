"""Describes a device to the launchers of kernels, which cut their work by it. The interpreter counts as a small GPU."""

from functools import cache
from typing import Any

import torch

from nanoinfer.device import compute_capability, import_error

FIRST_GLUON = 3, 6  # the first Triton whose Gluon has what our kernels use


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors the device has; for Triton's interpreter, a few."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_fp8_products(device: torch.device) -> bool:
    """Return whether the device multiplies FP8: NVIDIA GPUs from compute capability 8.9 (Ada, Hopper) on."""
    return torch.version.cuda is not None and compute_capability(device) >= (8, 9) and not import_error("triton")


@cache
def has_rowwise_scaled_mm(device: torch.device) -> bool:
    """Return whether `torch._scaled_mm` takes a scale for each row: on data-center GPUs from Hopper on.

    Ada and RTX 50 GPUs (8.9, 12.0) multiply FP8 too, but builds of PyTorch may lack the kernel for such scales there.
    """
    return compute_capability(device)[0] in (9, 10)


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Return whether kernels for Hopper GPUs run: the device is one, and this Triton has the Gluon that we write."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if import_error("triton"):
        return False
    import triton

    # Nothing is imported as a trial: a module of ours that fails to import must not pass for an old Triton.
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_GLUON


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a program may have 200 KiB, as on a Hopper GPU; on others it is 99 or 163."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)  # typed without this field
    return bool(properties.shared_memory_per_block_optin >= 200 * 2**10)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is at least so large. number: from 1 on.

    Triton's takes 3 us, in each launch of a kernel.
    """
    return 1 << (number - 1).bit_length()
