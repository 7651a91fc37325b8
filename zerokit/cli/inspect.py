"""`zerokit inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from zerokit.checkpoint.inspect import ParameterSummary, Summary

_DEPTH = 16
"""Levels of modules shown as a tree; what a hostile name has beyond them stays in one line."""


@dataclass
class _Node:
    """A module, a parameter, or both."""

    parameter: ParameterSummary | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def signature(self) -> object:
        """Equal for modules that hold the same."""
        own = self.parameter and (_details(self.parameter), self.parameter.numel)
        return own, tuple((name, child.signature()) for name, child in self.children.items())


@click.command()
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print all of it on stdout as JSON, and nothing else there."
)
def command(checkpoint: Path, as_json: bool) -> None:
    """Show what CKPT, a step or a run, holds: step, world size, parameters, streams, files.

    Layers that are alike are shown once. Nothing is proven: that is what verify does.
    """
    from zerokit.checkpoint.inspect import inspect

    summary = inspect(checkpoint)
    if as_json:
        click.echo(json.dumps(summary.plain(), indent=2))
    else:
        _print(summary)


def _print(summary: Summary) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from zerokit.cli.text import counted, decimal_size, printable

    def text(label: str, detail: str = "") -> Text:
        return Text.assemble((printable(label), "bold"), (f"  {printable(detail)}" if detail else "", "dim"))

    weights = ", weights only" if summary.weights_only else ""
    root = Tree(
        text(
            str(summary.path),
            f"step {summary.step}, {counted(summary.world, 'rank')}{weights}, {decimal_size(summary.bytes)}",
        )
    )
    streams = root.add(text("streams", f"of {counted(summary.units, 'unit')}"))
    for stream in summary.streams:
        amount = f"{counted(stream.parameters, 'parameter')}, {counted(stream.numel, 'element')}"
        streams.add(text(stream.kind, f"{stream.dtype}, {amount}, {decimal_size(stream.bytes)}"))
    parameters = root.add(
        text("parameters", f"{summary.trainable_numel:,} trainable elements, {summary.frozen_numel:,} frozen")
    )
    _grow(parameters, _modules(summary.parameters), text)
    if summary.common:
        common = root.add(text("stored whole", "common.safetensors"))
        for tensor in summary.common:
            common.add(text(tensor.name, f"{tensor.dtype} {list(tensor.shape)}"))
    files = root.add(text("files"))
    for file in summary.files:
        files.add(text(file.name, decimal_size(file.bytes)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # no line of a pipe is folded
    console.print(root)


def _modules(parameters: Iterable[ParameterSummary]) -> _Node:
    root = _Node()
    for parameter in parameters:
        node = root
        for part in parameter.name.split(".", _DEPTH):
            node = node.children.setdefault(part, _Node())
        node.parameter = parameter
    return root


def _grow(tree: Tree, node: _Node, text: Callable[[str, str], Text]) -> None:
    for label, child in _alike(node):
        _grow(tree.add(text(label, _details(child.parameter) if child.parameter else "")), child, text)


def _alike(node: _Node) -> Iterator[tuple[str, _Node]]:
    """The children, neighbouring numbered ones that hold the same as one: "0 – 11 (12 alike)"."""

    def key(item: tuple[str, _Node]) -> object:
        name, child = item
        return child.signature() if name.isdecimal() else name

    for _, members in groupby(node.children.items(), key):
        found = list(members)
        first, last = found[0][0], found[-1][0]
        yield (f"{first} – {last} ({len(found)} alike)" if len(found) > 1 else first), found[0][1]


def _details(parameter: ParameterSummary) -> str:
    group = f", group {parameter.group}" if parameter.group else ""
    tied = f", tied with {', '.join(parameter.aliases)}" if parameter.aliases else ""
    frozen = "" if parameter.trainable else ", frozen"
    return f"{parameter.dtype} {list(parameter.shape)}{frozen}{group}{tied}"
