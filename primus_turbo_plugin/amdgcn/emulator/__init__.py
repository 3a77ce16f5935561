"""Functional emulation of compiled kernels: what the instructions do, not how long they take."""
