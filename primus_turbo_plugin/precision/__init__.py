"""Number formats, scale rules, rotation, rounding, recipes and quantised tensors: pure data and the law of the numerics."""
