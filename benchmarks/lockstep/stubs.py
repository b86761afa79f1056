"""Stands in for what a published scheduler imports and does not need to schedule: torch, its own engine, its configuration.

An import of a stubbed name gives a module whose every attribute is a class that takes any arguments, can be subclassed,
subscripted and used as a decorator. A scheduler that asks it for a number fails at once, as it cannot be compared.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Meta(name, (Stub,), {})
        setattr(cls, name, found)
        return found

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **named: Any) -> Any:
        # A decorator without arguments.
        if cls.__module__ == __name__ and len(args) == 1 and not named and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return super().__call__(*args, **named)


class Stub(metaclass=_Meta):
    """Anything: keeps its named arguments as attributes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *args: Any, **named: Any) -> None:
        self.__dict__.update(named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Meta(name, (Stub,), {})

    def __call__(self, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return Stub()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Module(types.ModuleType):
    """A module of stubs."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Meta(name, (Stub,), {"__module__": __name__})
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all names below ``stubbed`` but those that are below ``real`` (or packages on the way to one)."""

    def __init__(self, stubbed: Iterable[str], real: Iterable[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self.stubbed, self.real, self.given = tuple(stubbed), tuple(real), dict(given)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.stubbed or any(name == one or name.startswith(one + ".") for one in self.real):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Module(spec.name)
        module.__dict__.update(self.given.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def absent(*names: str) -> list[str]:
    """Those that are not installed here: what is there need not be stubbed, and this project may use it itself."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def package(name: str, folder: str) -> None:
    """An empty package whose modules are found in ``folder``: its own ``__init__`` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [folder]
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
