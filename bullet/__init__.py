"""Bullet: how should one GPU be shared between prefill and decode?"""

from bullet.version import VERSION as __version__

__all__ = ["__version__"]
