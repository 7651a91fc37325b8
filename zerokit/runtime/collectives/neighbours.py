"""The ranks of one node read each other's pieces, instead of sending them through sockets.

board      which rank offered what, which has read it, which is alive
access     how a rank reads what others offer: `foreign` reads other processes' memory, where the kernel allows it;
           `windows` needs no rights, but every offer is copied to where the others see it
passing    how the node's ranks exchange descriptors of the files that they share

`meet` finds out which ranks are of one node and what works there, and all ranks of the group decide the same.

[Note: a node] Ranks are of one node if their host's name, its boot, their network namespace and their torchrun agent
(GROUP_RANK) are the same. So nodes that are simulated on one machine send to each other what nodes would.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.collectives.access import Access
from zerokit.runtime.collectives.board import Board, Kind, new_board
from zerokit.runtime.collectives.foreign import SWITCH, ForeignMemory, Token, can_read, let_siblings_in
from zerokit.runtime.collectives.passing import Door, close_all, join
from zerokit.runtime.collectives.windows import Windows, new_window


class Ways(IntEnum):
    """Through what the ranks of a node can exchange tensors; each includes those before it."""

    SOCKETS = 0
    SHARED = 1
    MEMORY = 2


class Neighbours:
    """One rank's access to the others of its node. Made by `meet`.

    Args:
        rank: this rank.
        pids: the processes of the node's ranks, this one's too.
        board: theirs.
        access: the way to what they offer.
    """

    def __init__(self, rank: int, pids: dict[int, int], board: Board, access: Access) -> None:
        self.rank = rank
        self.peers = [peer for peer in pids if peer != rank]
        self.route = access.route
        self._ranks, self._pids, self._board, self._access = list(pids), pids, board, access
        self._lent: defaultdict[tuple[Kind, int], list[tuple[int, int, int]]] = defaultdict(list)
        """Offers not known to be taken yet: which of its unit, under what number, bytes."""

    def offer_piece(self, unit: int, piece: Tensor) -> int:
        """Let the others gather `piece`, until it is `taken`. Returns which offer of this unit it is."""
        return self._offer(Kind.GATHER, unit, piece.view(1, -1), [0])

    def offer_bucket(self, unit: int, pieces: Tensor) -> int:
        """Let each of the others read its row of `pieces` [world × piece], until all have."""
        return self._offer(Kind.REDUCE, unit, pieces, self.peers)

    def _offer(self, kind: Kind, unit: int, pieces: Tensor, rows: list[int]) -> int:
        number = self._access.lend(pieces, rows) if rows and self.peers else 0
        count = self._board.offer(kind, unit, number)
        if self.peers:
            self._lent[kind, unit].append((count, number, pieces.numel() * pieces.element_size()))
        return count

    def offered(self, kind: Kind, unit: int, count: int) -> dict[int, int] | None:
        """Under what numbers the others offer, once all have made this offer."""
        numbers = self._board.offered(kind, unit, count)
        if numbers is None:
            return None
        return {peer: number for peer, number in zip(self._ranks, numbers, strict=True) if peer != self.rank}

    def take(self, kind: Kind, unit: int, count: int) -> None:
        """Mark this offer as read by this rank."""
        self._board.take(kind, unit, count)

    def taken(self, kind: Kind, unit: int, count: int) -> bool:
        """Whether all others have read what this rank offered; what was lent for it is then taken back."""
        if not self._board.taken(kind, unit, count):
            return False
        lent = self._lent[kind, unit]
        while lent and lent[0][0] <= count:
            _, number, size_bytes = lent.pop(0)
            self._access.take_back(number, size_bytes)
        return True

    def read(self, peer: int, number: int, into: Tensor) -> None:
        """Copy what rank `peer` offers under `number` into contiguous host memory."""
        self._access.read(peer, number, into)

    def look_at(self, peer: int, number: int, scratch: Tensor) -> Tensor:
        """The same, perhaps without a copy, else in `scratch`. Not to be written to."""
        return self._access.look_at(peer, number, scratch)

    def trim(self) -> None:
        """Keep no memory for offers to come."""
        self._access.trim()

    def require_alive(self) -> None:
        """Raise `RuntimeError` naming all ranks of this node whose processes have ended: one may be the cause."""
        gone = [
            f"rank {peer} (process {self._pids[peer]})"
            for position, peer in enumerate(self._ranks)
            if peer != self.rank and not self._board.is_alive(position)
        ]
        if gone:
            what = (
                "has ended, or dropped its model" if len(gone) == 1 else "have ended, or dropped their models"
            )
            raise RuntimeError(f"{' and '.join(gone)} {what}")


@dataclass(frozen=True)
class _Card:
    """What each rank sends to all others at the start; numbers below 2⁶³."""

    ways: int
    node: int
    pid: int
    parent: int
    token_address: int
    token: int
    door: int


def meet(group: dist.ProcessGroup, units: int) -> Neighbours | None:
    """Access to the ranks of this node, or None on all ranks of the group, which must be gloo's.

    Where there are several nodes, a rank that is alone on its own has access to no other.
    """
    rank, world = group.rank(), group.size()
    if world < 2:
        return None
    ways, token = _wanted(), Token()
    with ExitStack() as stack:
        door = window = None
        if ways is not Ways.SOCKETS:
            try:
                door = stack.enter_context(Door())
                window = new_window()
                stack.callback(os.close, window)
            except OSError:
                ways = Ways.SOCKETS
        number = door.number if door is not None else 0
        table = torch.zeros(world, len(_Card.__dataclass_fields__), dtype=torch.int64)
        table[rank] = torch.tensor(
            astuple(_Card(ways, _node(), os.getpid(), os.getppid(), token.address, token.value, number))
        )
        dist.all_reduce(table, group=group)
        cards = [_Card(*row) for row in table.tolist()]
        ranks = [peer for peer, card in enumerate(cards) if card.node == cards[rank].node]
        alone = len({card.node for card in cards}) == world
        if alone or min(card.ways for card in cards) == Ways.SOCKETS:
            return None
        assert door is not None
        assert window is not None
        explored = _explore(rank, {peer: cards[peer] for peer in ranks}, units, door, window)
        agreed = torch.tensor([explored.ways])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        return explored.neighbours(rank, Ways(int(agreed.item())), {peer: cards[peer].pid for peer in ranks})


@dataclass
class _Exploration:
    """Which ways work on this rank, and the objects that they need."""

    ways: Ways
    board: Board | None = None
    windows: dict[int, int] | None = None

    def neighbours(self, rank: int, ways: Ways, pids: dict[int, int]) -> Neighbours | None:
        """The access that all agreed on."""
        board, windows = self.board, self.windows or {}
        if ways is Ways.SHARED and board is not None:
            return Neighbours(rank, pids, board, Windows(rank, windows))
        close_all(list(windows.values()))
        if ways is Ways.MEMORY and board is not None:
            return Neighbours(rank, pids, board, ForeignMemory(pids))
        return None


def _explore(rank: int, cards: dict[int, _Card], units: int, door: Door, window: int) -> _Exploration:
    """Exchange descriptors with the node's ranks, whose `cards` these are, and see whether they can be read."""
    ranks = list(cards)
    position = ranks.index(rank)
    let_siblings_in([card.parent for card in cards.values()])  # before any of them tries to read
    try:
        if position == 0:
            shared = new_board(len(ranks), units)
            try:
                windows = door.collect(len(ranks), shared, os.dup(window))
            except OSError:
                os.close(shared)
                raise
        else:
            shared, windows = join(cards[ranks[0]].door, position, len(ranks), window)
        board = Board(shared, position, len(ranks), units)
    except (
        OSError,
        ValueError,
    ):  # another size of board: the ranks' models differ, which a later check reports
        return _Exploration(Ways.SOCKETS)
    readable = all(can_read(card.pid, card.token_address, card.token) for card in cards.values())
    ways = min(Ways(card.ways) for card in cards.values())
    return _Exploration(ways if readable else Ways.SHARED, board, dict(zip(ranks, windows, strict=True)))


def _wanted() -> Ways:
    """What this rank's environment allows."""
    value = os.environ.get(SWITCH, "1")
    wanted = {"0": Ways.SOCKETS, "shared": Ways.SHARED, "1": Ways.MEMORY, "": Ways.MEMORY}.get(value)
    if wanted is None:
        raise UsageError(
            f"{SWITCH}={value!r}: 0 stands for sockets, shared for shared memory, 1 for the best that works"
        )
    # The board relies on x86's order of stores.
    return wanted if sys.platform == "linux" and platform.machine() == "x86_64" else Ways.SOCKETS


def _node() -> int:
    """A number that all ranks of this rank's node have; see [Note: a node]."""
    parts = [socket.gethostname(), os.environ.get("GROUP_RANK", "")]
    if sys.platform == "linux":
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little") >> 2
