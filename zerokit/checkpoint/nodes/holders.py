"""Which nodes hold copies of which: arithmetic without torch."""

from __future__ import annotations

from collections.abc import Sequence


def holders(nodes: int, copies: int, groups: int = 1) -> list[list[int]]:
    """By node, the nodes that hold its files: itself, and `copies` − 1 others, or as many as there are.

    Nodes are numbered by their first ranks, and `groups` divides them into as many runs of equal length: replica
    groups, each of which has one whole model. A copy goes to another group while there is one, for groups are lost as
    one. Each node gets as many copies as it gives.
    """
    each = nodes // groups if groups and nodes % groups == 0 else nodes
    groups = nodes // each
    # Neighbours in the next groups come first, then, one place further, those of all groups with its own last.
    shifts = [(group, place) for place in range(each) for group in (*range(1, groups), 0)]
    shifts = [(0, 0), *(shift for shift in shifts if shift != (0, 0))][:copies]
    return [
        [(node // each + group) % groups * each + (node + place) % each for group, place in shifts]
        for node in range(nodes)
    ]


def held_by(holders_of: Sequence[Sequence[int]], node: int) -> list[int]:
    """The nodes whose files a node holds, its own first."""
    others = [other for other, holding in enumerate(holders_of) if node in holding and other != node]
    return [node, *others]
