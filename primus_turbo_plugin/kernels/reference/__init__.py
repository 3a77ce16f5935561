"""Torch kernels: slow, exact, and the oracle that every other backend is held to."""
