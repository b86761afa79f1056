"""How long a step takes: devices."""
