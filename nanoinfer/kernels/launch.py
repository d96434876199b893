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

FIRST_DRIVER = 12030  # of CUDA 12.3: CUDA graphs know such launches from there on


@cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with the constant OVERLAP: on where the GPU and its driver have the means."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"OVERLAP": False}
    driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined, unused-ignore]
    if driver < FIRST_DRIVER or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
