"""Programmatic dependent launch: a kernel takes its place on the GPU while the one before it still runs.

A decode step is hundreds of kernels of a few microseconds each, so the pause between one's end and the next one's start
counts. A kernel launched with these options starts early, and every program of it calls `gdc_wait` before it touches
what others compute or use; before that it may only read what the kernel just before it leaves alone. It calls
`gdc_launch_dependents` once the next kernel may start (CUDA Programming Guide, "Programmatic Dependent Launch and
Synchronization").
"""

from functools import cache
from typing import Any

import torch


@cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with the constant OVERLAP: on from compute capability 9.0 on, which has the means."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    if is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
