"""Gluon kernels."""
