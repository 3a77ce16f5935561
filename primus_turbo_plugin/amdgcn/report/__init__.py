"""Static report on compiled kernels: resources, occupancy, the hot loop and what bounds it. Estimates, not measurements."""
