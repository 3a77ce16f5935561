"""Autograd functions over plain tensors; nothing here knows Megatron."""
