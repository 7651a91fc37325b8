"""Which steps go from the nodes' own directories before the next one is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from zerokit.checkpoint.disk import is_there
from zerokit.checkpoint.nodes.complete import Holding, Key, choose
from zerokit.checkpoint.nodes.members import Nodes
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.nodes.scan import scan
from zerokit.checkpoint.prune import remove_steps
from zerokit.checkpoint.run import number_of
from zerokit.checkpoint.together import Together


def remove_older(together: Together, nodes: Nodes, target: Path, run: str, keep: int) -> bool:
    """Remove what `superfluous` lists on every node. Collective.

    Returns whether there is a step at `target` that the nodes do not have together, so that it may be replaced.
    """
    own = together.each(lambda: scan(target.parent) if together.rank == nodes.first else [])
    every = [holding for node in together.exchange(own) for holding in node]
    complete = choose(every, whole=False).complete
    # Ordinary steps, which have no record, stay.
    others = [one for one in own if one.place != str(target) and is_there(Path(one.place, NODE_NAME))]
    gone = superfluous(others, complete, run, keep)
    together.each(lambda: remove_steps(Path(one.place) for one in gone))
    there = [one for one in every if one.step == number_of(target)]
    return all(one.key not in complete for one in there)


def superfluous(own: Sequence[Holding], complete: Collection[Key], run: str, keep: int) -> list[Holding]:
    """The steps that a node no longer needs: all that were saved before the newest `keep` complete ones.

    Also those that this training, `run`, has saved in part. What is damaged counts as the oldest.
    """
    gone, kept = [], 0
    dated = [(one.record.saved if one.record is not None else 0, one.step, one) for one in own]
    for _, _, one in sorted(dated, key=lambda item: item[:2], reverse=True):
        whole = one.key in complete
        if kept == keep or (not whole and one.record is not None and one.record.run == run):
            gone.append(one)
        else:
            kept += whole
    return gone
