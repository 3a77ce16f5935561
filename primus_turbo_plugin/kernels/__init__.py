"""Kernels, one folder a backend with the same function names in each, and the registry that chooses between them."""
