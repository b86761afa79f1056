"""``bullet-plus``: ours, on Algorithm 1's lanes and branches; start at algorithm.py."""

from bullet.policies.plus.algorithm import BulletPlus

__all__ = ["BulletPlus"]
