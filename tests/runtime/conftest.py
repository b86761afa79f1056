"""The stub driver lies beside the tests; they import it by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
