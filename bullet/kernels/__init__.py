"""Triton kernels of serving, each beside its wrapper and its torch reference, and the probes that a sweep needs."""
