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

    from zerokit.checkpoint.inspect import ParameterSummary, RunSummary, Summary

_DEPTH = 16
"""Levels of modules shown as a tree; what a hostile name has beyond them stays in one line."""

_FORMATS = {"deepspeed": "DeepSpeed", "dcp": "DCP", "huggingface": "Hugging Face"}

_MOST = 2000
"""Lines of a list that are shown: a small file can name more than is readable, and drawing a line is slow."""


@dataclass
class _Node:
    """A module, a parameter, or both."""

    parameter: ParameterSummary | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def signature(self) -> object:
        """A key that is equal for modules with the same contents."""
        own = self.parameter and (_details(self.parameter), self.parameter.numel)
        return own, tuple((name, child.signature()) for name, child in self.children.items())


@click.command()
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print only JSON on stdout.")
def command(checkpoint: Path, as_json: bool) -> None:
    """Show the contents of CKPT, a step or a run: step, world size, parameters, streams, files.

    Checkpoints of DeepSpeed, DCP (FSDP2) and Hugging Face are shown, too.

    For a run, the newest step is shown, with a list of all steps and of unfinished saves. Equal layers are shown
    once. Nothing is verified: use verify for that.
    """
    from zerokit.checkpoint.inspect import inspect
    from zerokit.cli.text import note
    from zerokit.cli.work import json_of

    summary = inspect(checkpoint)
    note(summary.notes)
    if as_json:
        click.echo(json.dumps(json_of(summary), indent=2))
    else:
        _print(summary)


def _print(summary: Summary) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from zerokit.cli.text import counted, decimal_size
    from zerokit.text import printable

    def text(label: str, detail: str = "") -> Text:
        return Text.assemble((printable(label), "bold"), (f"  {printable(detail)}" if detail else "", "dim"))

    weights = ", weights only" if summary.weights_only else ""
    form = "" if summary.format == "zerokit" else f"{_FORMATS[summary.format]}, "
    root = Tree(
        text(
            str(summary.path),
            f"{form}step {summary.step}, {counted(summary.world, 'rank')}{weights}, {decimal_size(summary.bytes)}",
        )
    )
    if summary.run is not None:
        _add_run(root, summary.run, text)
    streams = root.add(text("streams", f"of {counted(summary.units, 'unit')}"))
    for stream in summary.streams:
        amount = f"{counted(stream.parameters, 'parameter')}, {counted(stream.numel, 'element')}"
        streams.add(text(stream.kind, f"{stream.dtype}, {amount}, {decimal_size(stream.bytes)}"))
    parameters = root.add(
        text("parameters", f"{summary.trainable_numel:,} trainable elements, {summary.frozen_numel:,} frozen")
    )
    _grow(parameters, _modules(summary.parameters), text, _MOST)
    if summary.common:
        where = "common.safetensors" if summary.format == "zerokit" else "buffers and the optimizer's scalars"
        common = root.add(text("stored whole", where))
        for tensor in summary.common[:_MOST]:
            common.add(text(tensor.name, f"{tensor.dtype} {list(tensor.shape)}"))
        _rest(common, len(summary.common), text)
    files = root.add(text("files"))
    for file in summary.files[:_MOST]:
        files.add(text(file.name, decimal_size(file.bytes)))
    _rest(files, len(summary.files), text)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # no line of a pipe is folded
    console.print(root)


def _add_run(tree: Tree, run: RunSummary, text: Callable[[str, str], Text]) -> None:
    from zerokit.cli.text import decimal_size

    steps = tree.add(text("steps", f"of {run.path}"))
    for step in run.steps:
        said = (
            decimal_size(step.bytes),
            "weights only" if step.weights_only else "",
            "superseded: load skips it" if step.superseded else "",
            f"damaged: {step.damaged}" if step.damaged else "",
        )
        steps.add(text(step.name, ", ".join(filter(None, said))))
    if run.leftovers:
        begun = tree.add(text("not finished", "zerokit prune removes those of dead writers"))
        for left in run.leftovers:
            begun.add(text(left.path.name, f"{decimal_size(left.size)}, {left.describe()}"))


def _modules(parameters: Iterable[ParameterSummary]) -> _Node:
    root = _Node()
    for parameter in parameters:
        node = root
        for part in parameter.name.split(".", _DEPTH):
            node = node.children.setdefault(part, _Node())
        node.parameter = parameter
    return root


def _rest(tree: Tree, number: int, text: Callable[[str, str], Text]) -> None:
    if number > _MOST:
        tree.add(text("…", f"and {number - _MOST:,} more (--json lists all)"))


def _grow(tree: Tree, node: _Node, text: Callable[[str, str], Text], room: int) -> int:
    """Add lines for what the node holds, at most `room`; returns how many more may follow."""
    for label, child in _alike(node):
        if not room:
            tree.add(text("…", "and more (--json lists all)"))
            break
        line = tree.add(text(label, _details(child.parameter) if child.parameter else ""))
        room = _grow(line, child, text, room - 1)
    return room


def _alike(node: _Node) -> Iterator[tuple[str, _Node]]:
    """The children, neighbouring numbered ones that hold the same as one: "0 – 11 (12 alike)"."""

    def key(item: tuple[str, _Node]) -> object:
        name, child = item
        return child.signature() if name.isdecimal() else name

    for _, members in groupby(node.children.items(), key):
        same = list(members)
        first, last = same[0][0], same[-1][0]
        yield (f"{first} – {last} ({len(same)} alike)" if len(same) > 1 else first), same[0][1]


def _details(parameter: ParameterSummary) -> str:
    group = f", group {parameter.group}" if parameter.group else ""
    tied = f", tied with {', '.join(parameter.aliases)}" if parameter.aliases else ""
    frozen = "" if parameter.trainable else ", frozen"
    return f"{parameter.dtype} {list(parameter.shape)}{frozen}{group}{tied}"
