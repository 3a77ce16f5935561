"""What Megatron sees: spec provider, layer and stack specs, version differences."""
