"""Our rivals' schedulers beside the published ones, step by step; ``make lockstep``."""
