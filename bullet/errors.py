"""What can go wrong, by whose fault.

A :class:`BulletError` is the user's to repair: its message is one line that names the file or the value and
what is allowed, and the command line prints it without a traceback and exits with status 2. A broken
invariant of ours is an ``AssertionError`` with the values in it.
"""


MOST_MESSAGE = 2500
"""Characters of a message: a line on which all that may stand is listed has some 1,200."""


def printable(what: object) -> str:
    """A text of somebody else's as one to print: what a terminal would obey, and what cannot be encoded, is escaped."""
    text = str(what)
    return text if text.isprintable() else "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


class BulletError(Exception):
    """Base of every error that a user can cause and repair. Its message is safe to print whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        text = printable(message)
        # Whatever it quotes: a name of a megabyte tells no more than its ends.
        super().__init__(text if len(text) <= MOST_MESSAGE else f"{text[:MOST_MESSAGE - 500]} .. {text[-496:]}")


class ConfigError(BulletError):
    """An unknown key, name or option, or a value outside what is allowed."""


class UnknownOptionError(ConfigError):
    """``policy.options.<option>``, which a policy does not have."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class TraceError(BulletError):
    """A trace file that cannot be read as the requests it should hold."""


class ProfileError(BulletError):
    """A measured table or fitted profile that is missing, inconsistent or asked outside its range."""


class PartitionError(BulletError):
    """A split of the SMs that the device or the mechanism cannot grant."""


class PolicyError(ConfigError):
    """A user's own policy that failed; names its file and line and the time in the run, and is raised from what it raised."""


class EngineError(BulletError):
    """Weights that cannot be read, a model or cache that does not fit, or a device that failed under the engine."""


class ResultsError(BulletError):
    """A results folder that exists already, cannot be written, or cannot be read."""


class NoProgressError(BulletError):
    """A run in which nothing can happen any more although requests are unfinished; carries the state."""


def require(ok: bool, what: str, value: object, allowed: str) -> None:
    """A value of the user's that must hold: else a :class:`ConfigError` with the value and what is allowed."""
    if not ok:
        raise ConfigError(f"{what} = {short(value)}: must be {allowed}")


def one_line(what: object, most: int | None = None) -> str:
    """A message of somebody else's for a line of ours: its words, the first ``most`` characters."""
    return " ".join(str(what).split())[:most]


def short(value: object, most: int = 60) -> str:
    """A value of the user's as a message shows it, whatever its size."""
    try:
        text = value if isinstance(value, str) and most > 60 else repr(value)
    except (ValueError, RecursionError):  # more digits, or deeper, than Python prints
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= most else f"{text[:most - 3]}..."
