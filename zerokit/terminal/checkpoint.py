"""A checkpoint as a tree: its nodes, steps, streams, modules and files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text
from rich.tree import Tree

from zerokit.checkpoint.inspect import ParameterSummary, RunSummary, Summary
from zerokit.checkpoint.nodes.complete import listed
from zerokit.terminal.screen import unfolded
from zerokit.text import counted, decimal_size, printable

_DEPTH = 16
"""Levels of modules shown as a tree; what a hostile name has beyond them stays in one line."""

_FORMATS = {"deepspeed": "DeepSpeed", "dcp": "DCP", "huggingface": "Hugging Face", "torch": "torch.save"}

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


def _add(tree: Tree | None, label: str, detail: str = "") -> Tree:
    """A branch of the tree, or a new tree."""
    parts = (printable(label), "bold"), (f"  {printable(detail)}" if detail else "", "dim")
    return Tree(Text.assemble(*parts)) if tree is None else tree.add(Text.assemble(*parts))


def _add_list(tree: Tree, rows: Sequence[tuple[str, str]]) -> None:
    for row in rows[:_MOST]:
        _add(tree, *row)
    if len(rows) > _MOST:
        _add(tree, "…", f"and {len(rows) - _MOST:,} more (--json lists all)")


def show(summary: Summary) -> None:
    """Print the tree on stdout."""
    weights = ", weights only" if summary.weights_only else ""
    form = "" if summary.format == "zerokit" else f"{_FORMATS[summary.format]}, "
    whole = f"{counted(summary.world, 'rank')}{weights}, {decimal_size(summary.bytes)}"
    root = _add(None, str(summary.path), f"{form}step {summary.step}, {whole}")
    _add_nodes(root, summary)
    if summary.skipped_steps:
        row = f", the last {summary.skipped_in_a_row:,} in a row" if summary.skipped_in_a_row else ""
        _add(root, "skipped steps", f"{summary.skipped_steps:,} until this save{row}")
    if summary.run is not None:
        _add_run(root, summary.run)
    streams = _add(root, "streams", f"of {counted(summary.units, 'unit')}")
    for stream in summary.streams:
        amount = f"{counted(stream.parameters, 'parameter')}, {counted(stream.numel, 'element')}"
        _add(streams, stream.kind, f"{stream.dtype}, {amount}, {decimal_size(stream.bytes)}")
    elements = f"{summary.trainable_numel:,} trainable elements, {summary.frozen_numel:,} frozen"
    _grow(_add(root, "parameters", elements), _modules(summary.parameters), _MOST)
    if summary.extra_ranks:
        names = ", ".join(name or "all of it" for name in summary.by_rank)
        _add(root, "extra", f"of each of {counted(summary.extra_ranks, 'rank')}: {names}")
    if summary.common:
        where = "common.safetensors" if summary.format == "zerokit" else "buffers and the optimizer's scalars"
        tensors = [(tensor.name, f"{tensor.dtype} {list(tensor.shape)}") for tensor in summary.common]
        _add_list(_add(root, "stored whole", where), tensors)
    if summary.frozen is not None:
        where = (
            f"in {summary.frozen} beside this step" if summary.frozen else "in no file: the model has them"
        )
        _add(root, "frozen parameters", where)
    _add_list(_add(root, "files"), [(file.name, decimal_size(file.bytes)) for file in summary.files])
    unfolded().print(root)


def _add_nodes(tree: Tree, summary: Summary) -> None:
    """What nodes' directories have of the step, and what none of them has."""
    for node in summary.nodes:
        if node.node is None:
            _add(tree, node.path, "without node.json" if node.lacks else "everything")
            continue
        said = [f"node {node.node} of {node.nodes}: rank{'s' * (len(node.ranks) > 1)} {listed(node.ranks)}"]
        if node.copies:
            said.append(f"copies of rank{'s' * (len(node.copies) > 1)} {listed(node.copies)}")
        if node.lacks:
            said.append(f"without {listed(node.lacks)}, which should be there")
        _add(tree, node.path, ", ".join(said))
    if summary.missing:
        _add(tree, "incomplete", summary.missing)


def _add_run(tree: Tree, run: RunSummary) -> None:
    steps = _add(tree, "steps", f"of {run.path}")
    for step in run.steps:
        said = (
            decimal_size(step.bytes),
            "weights only" if step.weights_only else "",
            f"{counted(step.skipped_steps, 'step')} skipped" if step.skipped_steps else "",
            "superseded: load skips it" if step.superseded else "",
            f"damaged: {step.damaged}" if step.damaged else "",
            f"incomplete: {step.incomplete}" if step.incomplete else "",
        )
        _add(steps, step.name, ", ".join(filter(None, said)))
    for base in run.frozen:
        _add(steps, base.name, f"{decimal_size(base.bytes)}, frozen parameters of steps")
    if run.leftovers:
        begun = _add(tree, "not finished", "zerokit prune removes those of dead writers")
        for left in run.leftovers:
            _add(begun, left.path.name, f"{decimal_size(left.size)}, {left.describe()}")


def _modules(parameters: Iterable[ParameterSummary]) -> _Node:
    root = _Node()
    for parameter in parameters:
        node = root
        for part in parameter.name.split(".", _DEPTH):
            node = node.children.setdefault(part, _Node())
        node.parameter = parameter
    return root


def _grow(tree: Tree, node: _Node, room: int) -> int:
    """Add lines for what the node holds, at most `room`; returns how many more may follow."""
    for label, child in _alike(node):
        if not room:
            _add(tree, "…", "and more (--json lists all)")
            break
        line = _add(tree, label, _details(child.parameter) if child.parameter else "")
        room = _grow(line, child, room - 1)
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
