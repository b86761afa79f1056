"""The simulated driver: simpy time, modelled devices. Knows nothing of torch or of the real runtime."""
