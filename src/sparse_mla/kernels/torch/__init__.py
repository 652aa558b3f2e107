"""Kernels in plain PyTorch: any device, the CPU first."""
