"""Measuring a device: partitions proven, then operations alone and side by side, into a table of rows that fits read.

``session`` is what to call: check(), sweep(). It asks one of three benches (``bench``: this machine's CPU, the simulator's
device; ``bench_cuda``: a GPU) for the points of a ``plan`` and appends their rows (``sweep``). torch is imported by use only.
"""
