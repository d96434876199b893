"""Programmatic dependent launch: a kernel starts on the GPU while the one before it is still running.

A decode step consists of hundreds of kernels of a few microseconds each, so the gaps between them count. A kernel
launched with these options starts early. Each of its programs calls `gdc_wait` before it reads what earlier kernels
compute, or writes what they use. Before that it may read weights, and what was there before the step's embeddings were
looked up: the kernel that does so is launched without these options, so it starts when all before it are done. If the
previous kernel calls `gdc_launch_dependents` after its own wait, the program may also read what older kernels wrote.
Most kernels call it right after their wait. Those that fetch weights early (as `few_rows_product` does), the one that
combines the splits of decode attention, and the norm that most products follow call it before, so that several kernels
may be waiting in a row. The next kernel starts when all programs of this one have called it, so it takes no program's
place. See the CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".

A kernel that waits in a loop is launched with num_stages=1. Triton 3.6 pipelines loops as if a wait were any other
computation, so a kernel of several stages fetches all that the first turns of the loop need before it waits.
"""

from functools import cache
from typing import Any

import torch

from nanoinfer.device import compute_capability


@cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Return the launch options, and the kernel's constant OVERLAP: on from compute capability 9.0 (Hopper) on."""
    if torch.version.cuda is not None and compute_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
