"""Triton kernels, one file each. Their plain PyTorch twins stand in `layers`, which works without Triton."""
