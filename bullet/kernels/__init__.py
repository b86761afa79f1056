"""Kernels, torch reference operations and the arithmetic of timing. torch and triton are imported by use only."""
