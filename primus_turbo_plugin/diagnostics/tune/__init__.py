"""`primus-turbo tune`: finds the fastest kernel configurations for a model's shapes on this GPU and keeps them in a file."""
