"""Named factors. All quantities inside the project are SI; names carry the unit (``_s``, ``_bytes`` ..).

``TERA`` is 10**12 everywhere, as in data sheets; binary factors are named ``KIB``, ``MIB``, ``GIB``.
"""

MICRO = 1e-6
MILLI = 1e-3
KILO = 1e3
MEGA = 1e6
GIGA = 1e9
TERA = 1e12

KIB = 1024
MIB = 1024**2
GIB = 1024**3
