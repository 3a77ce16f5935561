"""torch.nn modules with Megatron's constructor, forward and checkpoint contracts."""
