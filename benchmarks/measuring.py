"""What the scripts here share: options, rounds in alternating order, medians, bars, tables, the machine.

No torch: the process that starts what is measured should take no memory bandwidth from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from zerokit.bench.machine.host import cores, processor_name
from zerokit.bench.measure.environment import git_commit, measured_variables

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def read_options(text: str | None, words: Sequence[str] | None, /, **options: Any) -> Any:
    """The command line's options of a script whose docstring is `text`.

    Each keyword is an option with its default, or the type of an option without one; with a text behind it in a tuple,
    that is its help. A list takes some of its values, an empty one any words. A number whose default is positive must
    be positive. Keywords that begin with "_" are arguments.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, given in options.items():
        default, help = given if isinstance(given, tuple) else (given, None)
        how: dict[str, Any] = {"help": help, "default": None if isinstance(default, type) else default}
        if default is False:
            how["action"] = "store_true"
        elif isinstance(default, list):
            how |= {"nargs": "+", "choices": default} if default else {"nargs": "*"}
        elif isinstance(default, int | float) and default > 0:
            how["type"] = _positive(type(default))
        else:
            how["type"] = default if isinstance(default, type) else type(default)
        parser.add_argument(name.lstrip("_") if name[0] == "_" else f"--{name.replace('_', '-')}", **how)
    return parser.parse_args(words)


def _positive(kind: type[int | float]) -> Callable[[str], int | float]:
    def read(word: str) -> int | float:
        if (value := kind(word)) <= 0:
            raise argparse.ArgumentTypeError(f"{word} is not positive")
        return value

    read.__name__ = kind.__name__
    return read


def in_rounds(
    names: Sequence[str],
    rounds: int,
    measure: Callable[[str], T],
    keep: Callable[[dict[str, list[T]]], object] = lambda results: None,
) -> dict[str, list[T]]:
    """What `measure` returned for each name, round by round; `keep` is given what there is after every measurement.

    Every second round goes backwards, so that a machine that is slow for a while is so for all: trust the ratios.
    """
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            print(f"round {number + 1}/{rounds}: {name}", file=sys.stderr, flush=True)
            results[name].append(measure(name))
            keep(results)
    return results


def spread(values: Sequence[float], decimals: int) -> str:
    """The median with the least and the most: "1.19 (1.10–1.42)"."""
    return "{:.{d}f} ({:.{d}f}–{:.{d}f})".format(median(values), min(values), max(values), d=decimals)


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of the ratio of two values of the same round."""
    return median(value / other for value, other in zip(values, base, strict=True))


def bar_holds(name: str, measured: float, bar: float) -> bool:
    """Whether a figure is at most its bar; says so."""
    holds = measured <= bar
    print(f"{name}: {measured:.3f}, at most {bar:.3f}: {'holds' if holds else 'MISSED'}")
    return holds


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def empty(path: Path) -> None:
    """Remove what is there, and write what waits for the disk: who comes next does not pay for it."""
    remove(path)
    os.sync()


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words to the left, figures to the right; without rich, which a bare GPU machine may lack."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    figures = [
        all(cell.lstrip("+-")[:1].isdigit() or not cell for cell in cells)
        for cells in zip(*rows, strict=True)
    ] or [False] * len(columns)
    text = []
    for line in lines:
        cells = zip(line, widths, figures, strict=True)
        text.append(
            "  ".join(cell.rjust(w) if figure else cell.ljust(w) for cell, w, figure in cells).rstrip()
        )
    return "\n".join([title, "", text[0], "-" * max(map(len, text)), *text[1:]])


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write it where the user wants it, with the machine."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **content}, indent=1, default=str) + "\n")


def machine() -> dict[str, object]:
    """What the figures depend on, for the record."""
    return {
        "processor": processor_name(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "variables": measured_variables(os.environ),
        "git_commit": git_commit(ROOT),
    }
