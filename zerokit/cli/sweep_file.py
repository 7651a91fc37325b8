"""A sweep as a file in TOML: values of `zerokit bench`'s options by their names, `stage = [0, 1, 2, 3]`."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click

from zerokit.cli.lists import CommaList
from zerokit.text import printable


def use_sweep_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Use the file's values unless the command line or the environment sets them; all pass the same checks.

    Raises `click.UsageError` for invalid TOML, an unknown option, or an invalid value.
    """
    if path is None:
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(printable(f"{path} is not a TOML file of options: {error}")) from error
    known = {
        opt.removeprefix("--"): one
        for one in context.command.params
        if isinstance(one, click.Option)
        for opt in one.opts
    }
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see zerokit bench --help"
            raise click.UsageError(printable(f"{path}: {key!r} is not an option of zerokit bench: {hint}"))
        option = known[name]
        try:
            values[option.name or ""] = _as_given(option, value)
        except ValueError as error:
            raise click.UsageError(printable(f"{path}: {key}: {error}")) from error
    context.default_map = values


def _as_given(option: click.Option, value: Any) -> Any:
    """A value as it would stand on the command line, so that both are read by the same types."""
    if option.is_flag != isinstance(value, bool):
        raise ValueError(
            "expected true or false" if option.is_flag else "expected a value, not true or false"
        )
    if option.is_flag:
        return value
    values = value if isinstance(value, list) else [value]
    if not values or not all(
        isinstance(one, str | int | float) and not isinstance(one, bool) for one in values
    ):
        raise ValueError("expected a string, a number or a list of these")
    texts = [str(one) for one in values]
    if option.multiple:
        return texts
    if len(texts) > 1 and not isinstance(option.type, CommaList):
        raise ValueError(f"takes one value, not {len(texts)}")
    return ",".join(texts)
