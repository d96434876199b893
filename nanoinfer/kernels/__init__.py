"""Triton kernels, one file each. Their PyTorch twins are in `layers` and `sampling`, which work without Triton."""
