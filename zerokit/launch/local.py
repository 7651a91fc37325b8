"""Simulated nodes on this machine: all ranks of all nodes, which meet over loopback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zerokit.interrupts import Interrupts
from zerokit.launch.agents import GRACE_SECONDS, conduct
from zerokit.launch.limits import Limit, Limits
from zerokit.launch.ranks import Ranks, World
from zerokit.network import free_port


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: int,
    nproc_per_node: int,
    log_dir: Path,
    interrupts: Interrupts,
    environment: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
    limits: Sequence[Limit] = (),
    grace: float = GRACE_SECONDS,
) -> None:
    """Run `python -m module arguments` on nodes × nproc_per_node ranks and wait for all of them.

    Args:
        module: what each rank runs; it finds the torchrun environment.
        arguments: its command line.
        nodes: simulated ones.
        nproc_per_node: ranks of each.
        log_dir: an existing directory; each rank's output goes below it.
        interrupts: looked at while waiting.
        environment: variables set for every rank, beside those of this process.
        poll: called about twenty times a second while the ranks run.
        limits: what each rank may use, in rank order; none for as much as there is.
        grace: the seconds in which ranks may end by themselves after a signal.

    Raises:
        WorkerFailed: a rank failed or was killed.
        Interrupted: SIGINT or SIGTERM came; it was passed on.
        LimitError: the ranks cannot be held to limits here.
    """
    interrupts.check()
    # All nodes are this machine, so ranks count its devices together (see `bench.worker`).
    variables = {"ZEROKIT_NODES_ON_MACHINE": str(nodes), **(environment or {})}
    world = World(nodes, nproc_per_node, "127.0.0.1", free_port(), variables)
    with Limits(limits) as groups:
        began = groups.put if limits else lambda rank, pid: None
        ranks = Ranks(world, range(nodes * nproc_per_node), [module, *arguments], log_dir, began)
        conduct([ranks], log_dir, interrupts, poll, grace)
