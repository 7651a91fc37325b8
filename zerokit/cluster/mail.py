"""Messages between the processes of a launch, in torch's store, which one of them hosts: no call blocks.

    leader>2/5    the leader's message to process 2 with this number, or a piece of it: the store takes no long values
    >2            a counter that grows with each message to process 2
    2             a counter that grows while process 2 is alive

Whoever is not heard for `SILENCE_SECONDS` is given up, and so is everybody when the store is gone. Whoever reaches the
store's port can read and change what is in it, as in every program of torch.distributed (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from zerokit.patience import Patience

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

LEADER = "leader"
MEET_SECONDS = 60.0
"""Within which all must have joined."""
SILENCE_SECONDS = 12.0
"""A lost node is to be named within 20 s, with what ends its launch."""
HEARTBEAT_SECONDS = 1.0
_MUTE_HEARTBEATS = 2
_PIECE_BYTES = 4 << 20
"""Half of what the store takes as one value."""
_POLL_SECONDS = 0.05
_ROUND = "zerokit/round"
_CLOSE_SECONDS = 2.0
_STUCK_SECONDS = 5.0

Message = tuple[str, dict[str, Any]]


class Peer:
    """Another process: what is said to it and heard of it. A `Mail` carries both."""

    def __init__(self, own: str, name: str, patience: float) -> None:
        """`patience`: the seconds within which it must be heard for the first time."""
        self._name, self._to, self._from = name, f"{own}>{name}", f"{name}>{own}"
        self._sent = self._read = self._heartbeats = 0
        self._pieces: list[str] = []
        self._unsent: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._silence, self._mute = Patience(patience), Patience(_MUTE_HEARTBEATS * HEARTBEAT_SECONDS)
        self._gone = False
        self.met = False
        """Whether it was heard at all."""

    def say(self, kind: str, **content: Any) -> None:
        """Send a message."""
        self._unsent.put(json.dumps([kind, content]))

    def hear(self) -> Message | None:
        """The next message, if any; raises `EOFError` if it is gone and all that it said has been heard."""
        gone = self._gone or self._silence.over
        try:
            return self._received.get_nowait()
        except queue.Empty:
            if gone:
                raise EOFError from None
            return None

    @property
    def mute(self) -> bool:
        """Whether it has missed some heartbeats, which may be the beginning of a silence."""
        return self._mute.over

    def send(self, store: Store) -> None:
        """Put what was said into the store."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._unsent.get_nowait()
                for start in range(0, len(message), _PIECE_BYTES):
                    piece = message[start : start + _PIECE_BYTES]
                    last = "." if start + _PIECE_BYTES >= len(message) else "+"
                    store.set(f"{self._to}/{self._sent}", last + piece)
                    self._sent += 1
                store.add(f">{self._name}", 1)

    def receive(self, store: Store) -> None:
        """Take what is in the store."""
        while store.check([key := f"{self._from}/{self._read}"]):
            piece = store.get(key).decode()
            store.delete_key(key)
            self._read += 1
            self._heard()
            self._pieces.append(piece[1:])
            if piece[0] == ".":
                kind, content = json.loads("".join(self._pieces))
                self._pieces.clear()
                self._received.put((kind, content))

    def listen(self, store: Store) -> None:
        """Look at its heartbeats."""
        before, self._heartbeats = self._heartbeats, store.add(self._name, 0)
        if self._heartbeats != before:
            self._heard()

    def _heard(self) -> None:
        if not self.met:
            self.met, self._silence = True, Patience(SILENCE_SECONDS)
        self._silence.restart()
        self._mute.restart()

    def leave(self) -> None:
        """Nothing comes any more."""
        self._gone = True


class Mail:
    """A context in which a thread carries the messages of this process; it ends when they are delivered."""

    def __init__(
        self, connect: Callable[[], Store], own: str, others: Iterable[str], patience: float = MEET_SECONDS
    ) -> None:
        """`connect` is called by the thread; `others` are who this process talks to."""
        self.peers = {name: Peer(own, name, patience) for name in others}
        self.trouble: Exception | None = None
        """Why there is no store, or none any more."""
        self._own, self._closing, self._looked = own, threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(connect,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Mail:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)  # the store may not respond any more

    @property
    def stuck(self) -> bool:
        """Whether the store is gone, or does not respond for now."""
        return self.trouble is not None or time.monotonic() - self._looked > _STUCK_SECONDS

    def _work(self, connect: Callable[[], Store]) -> None:
        heartbeat, messages = 0.0, 0
        try:
            store = connect()
            while True:
                closing, self._looked = self._closing.is_set(), time.monotonic()
                for peer in self.peers.values():
                    peer.send(store)
                if (count := store.add(f">{self._own}", 0)) != messages:
                    messages = count
                    for peer in self.peers.values():
                        peer.receive(store)
                if time.monotonic() >= heartbeat:
                    heartbeat = time.monotonic() + HEARTBEAT_SECONDS
                    store.add(self._own, 1)
                    for peer in self.peers.values():
                        peer.listen(store)
                if closing:
                    break
                self._closing.wait(_POLL_SECONDS)
        except Exception as error:  # whatever ends this thread ends the others' hearing
            self.trouble = error
        for peer in self.peers.values():
            peer.leave()


def host_store(port: int, prefix: str = "") -> tuple[Callable[[], Store], int]:
    """A function that gives a store at this port, and the port, which 0 leaves to the system.

    The store ends with the last reference to the function. A `prefix` keeps keys apart from others' in it. Raises
    `RuntimeError` if the port is taken.
    """
    store = _tcp_store()("127.0.0.1", port, is_master=True)
    kept, port = _prefixed(store, prefix), store.port
    return lambda: kept, port


def join_store(address: str, port: int, prefix: str = "") -> Callable[[], Store]:
    """The function that connects to a store as soon as it is there; it raises `OSError` or `RuntimeError`."""
    make = _tcp_store()
    return lambda: _prefixed(make(socket.getaddrinfo(address, port)[0][4][0], port, is_master=False), prefix)


def begin_round(connect: Callable[[], Store]) -> Callable[[], Store]:
    """The function with which the leader begins anew in a store where former processes may have left their words."""

    def begin() -> Store:
        from torch._C._distributed_c10d import PrefixStore

        (store := connect()).set(_ROUND, prefix := f"zerokit/{uuid.uuid4().hex}")
        return PrefixStore(prefix, store)

    return begin


def join_round(connect: Callable[[], Store]) -> Callable[[], Store]:
    """The function that finds the round of the leader that is alive; it raises `TimeoutError`."""

    def join() -> Store:
        from torch._C._distributed_c10d import PrefixStore

        store, deadline = connect(), time.monotonic() + MEET_SECONDS
        found, heartbeats = "", 0
        while time.monotonic() < deadline:
            if store.check([_ROUND]):
                before, found = found, store.get(_ROUND).decode()
                led = PrefixStore(found, store)
                heartbeats = led.add(LEADER, 0) if found != before else heartbeats
                if led.add(LEADER, 0) != heartbeats:
                    return led
            time.sleep(_POLL_SECONDS)
        raise TimeoutError("number 0 has not come")

    return join


def _prefixed(store: Store, prefix: str) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store) if prefix else store


def _tcp_store() -> Callable[..., TCPStore]:
    # What its code written in C++ prints about lost connections is said by whoever calls it.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch._C._distributed_c10d import TCPStore

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # ranks are started with this environment
    return partial(TCPStore, timeout=timedelta(seconds=MEET_SECONDS), wait_for_workers=False)
