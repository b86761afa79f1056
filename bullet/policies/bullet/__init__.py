"""Algorithm 1 of the paper: ``algorithm`` is the file to read first."""

from bullet.policies.bullet.algorithm import Bullet, BulletLiteral, BulletPartition, BulletScheduler

__all__ = ["Bullet", "BulletLiteral", "BulletPartition", "BulletScheduler"]
