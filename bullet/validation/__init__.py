"""Simulated beside measured: recorded runs, serving points, the closed loop."""
