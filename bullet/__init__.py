"""Bullet: how should one GPU be shared between prefill and decode?"""

__version__ = "0.1.0"
