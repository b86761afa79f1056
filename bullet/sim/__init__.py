"""The simulated driver: simulated time, modelled devices. Knows nothing of torch or of the real runtime."""
