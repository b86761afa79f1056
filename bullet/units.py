"""Named factors. All quantities inside the project are SI; names carry the unit (``_s``, ``_bytes`` ..).

``TERA`` is 10**12 everywhere, as in data sheets; binary factors are named ``KIB``, ``MIB``, ``GIB``.
"""

import re

MICRO = 1e-6
MILLI = 1e-3
KILO = 1e3
MEGA = 1e6
GIGA = 1e9
TERA = 1e12

KIB = 1024
MIB = 1024**2
GIB = 1024**3

SECONDS_IN = {"ns": 1e-9, "us": MICRO, "ms": MILLI, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Units that a time may be written in."""


def parse_time_s(text: str) -> float | None:
    """``90s``, ``1.5min`` or ``500ms`` in seconds; ``None`` if it is not a finite number, 0 or more, and one of those units."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ns|us|ms|s|min|h)", text.strip())
    return float(match[1]) * SECONDS_IN[match[2]] if match else None
