"""Options of one configuration among several policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bullet.config import RunConfig
from bullet.errors import ConfigError, UnknownOptionError


def share_options(configs: Sequence[RunConfig], build: Callable[[RunConfig], object]) -> list[RunConfig]:
    """Each policy of a comparison with those of the options that it has; an option that none has is refused."""
    shared: list[RunConfig] = []
    refusals: dict[str, list[str]] = {}
    for config in configs:
        fitting: RunConfig | None = None
        while fitting is None:
            try:
                build(config)
                fitting = config
            except UnknownOptionError as exc:
                if exc.option not in config.policy.options:
                    raise
                refusals.setdefault(exc.option, []).append(str(exc))
                options = {name: value for name, value in config.policy.options.items() if name != exc.option}
                config = dataclasses.replace(config, policy=dataclasses.replace(config.policy, options=options))
        shared.append(fitting)
    for messages in refusals.values():
        if len(messages) == len(configs):
            raise ConfigError("; ".join(messages))
    return shared
