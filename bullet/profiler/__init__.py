"""Measuring a GPU: partitions proven, then operations alone and side by side."""
