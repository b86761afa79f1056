"""Shared by the cases, which ../test_interpreted.py runs in a process of their own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
