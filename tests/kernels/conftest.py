"""Triton 3.9 warns where this is not said, and 3.10 will change it: multiply-adds are fused, as up to 3.8."""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
