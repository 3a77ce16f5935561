"""Kernels the emulator is tested with, one module a kind; each has `isa_targets()`."""
