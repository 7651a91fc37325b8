"""Settings by module: how parts of a model get a stage or a precision of their own. Standard library only.

    stage={"backbone": 3, "backbone.norm": 2, "*": 1}

A key is a module's path and covers the module with all that is inside. A key that is no module's path stands for all
modules whose paths end with it: "router" for the router of every block. The key of the innermost module decides, of
several the longest, and "*" is the rest. A function is asked for every module by its path, which is "" for the model
itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from zerokit.errors import UsageError
from zerokit.layout import Parameter

REST = "*"
_MODULE = "module of the model"
_RULE = (
    "a key is the path of a module, as in model.named_modules(), or the end of some, and covers all inside; "
    f"{REST!r} is the rest"
)
_T = TypeVar("_T")


def is_by_module(given: object) -> bool:
    """Whether a setting is given by module: by a mapping or a function."""
    return isinstance(given, Mapping) or callable(given)


def settle(
    option: str, given: Mapping[str, Any] | Callable[[str], Any], modules: Collection[str]
) -> dict[str, Any]:
    """What `given` says of each of the `modules`, by path; those that no key covers are left out.

    Raises `UsageError` for a key that is the end of no module's path.
    """
    if not isinstance(given, Mapping):
        return {path: given(path) for path in modules}
    named = keys_by_path(option, given, modules)
    covering = {path: _covering(path, named) for path in modules}
    return {path: given[key] for path, key in covering.items() if key in given}


def keys_by_path(
    option: str, keys: Iterable[str], modules: Collection[str], what: str = _MODULE, rule: str = _RULE
) -> dict[str, str]:
    """The modules that `keys` name, or `what` else, by path, each with its key; `rule` says what a key may be.

    Raises `UsageError` as `settle` does.
    """
    named: dict[str, str] = {}
    for key in sorted((key for key in keys if key != REST), key=lambda key: len(str(key))):
        ends = [path for path in modules if path.endswith(f".{key}")] if key else []
        if (key not in modules and not ends) or not key:
            near = difflib.get_close_matches(str(key), modules, n=3)
            around = str(key).rpartition(".")[0]
            guess = ", ".join(map(repr, near)) or (around in modules and around and repr(around))
            raise UsageError(f"{option}: {key!r} is no {what}{f', but {guess} is' if guess else ''}: {rule}")
        named |= dict.fromkeys([key] if key in modules else ends, key)
    return named


def _covering(path: str, named: Mapping[str, str]) -> str:
    """The key of the innermost module around a path, itself included, that has one; else that of the rest."""
    while path:
        if path in named:
            return named[path]
        path = path.rpartition(".")[0]
    return REST


def of_parameters(option: str, settled: Mapping[str, _T], parameters: Iterable[Parameter]) -> dict[str, _T]:
    """Each parameter's setting, by name: that of the module which holds it.

    Raises `UsageError` for a parameter that no key covers, and for one that modules with different settings share.
    """
    found: dict[str, _T] = {}
    for parameter in parameters:
        names = (parameter.name, *parameter.aliases)
        if missing := [name for name in names if name.rpartition(".")[0] not in settled]:
            raise UsageError(f"{option}: no key covers {missing[0]}: add {REST!r} for the rest")
        values = [settled[name.rpartition(".")[0]] for name in names]
        if differing := [at for at, value in enumerate(values) if value != values[0]]:
            raise UsageError(
                f"{option}: {names[0]} and {names[differing[0]]} are one parameter, but have {values[0]!r} and "
                f"{values[differing[0]]!r}: give both modules the same"
            )
        found[parameter.name] = values[0]
    return found
