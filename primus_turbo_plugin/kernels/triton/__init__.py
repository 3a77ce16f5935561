"""Kernels in portable Triton, for NVIDIA and AMD GPUs. Importing this package needs no triton; its modules do."""
