"""The rendezvous of processes that another launcher has started: keys in a store, and signs of life."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from zerokit.launch.agents import GRACE_SECONDS
from zerokit.launch.failures import LaunchError
from zerokit.launch.membership import Membership

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
POLL_SECONDS = 0.1
# TCPStore takes values of 8 MiB at most (MAX_PAYLOAD_LEN in TCPStoreLibUvBackend.cpp).
_PIECE_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class Patience:
    """The waiting times of members, in seconds.

    Attributes:
        meet: until all have joined.
        lost: without a sign of life of another until it counts as gone.
        alive: from one sign of life to the next.
    """

    meet: float = 60.0
    lost: float = 15.0
    alive: float = 2.0


class Meeting:
    """The members' store. A thread shows that this member is alive."""

    def __init__(self, member: Membership, patience: Patience | None = None) -> None:
        """Meet all others; raises `LaunchError` where that takes longer than the patience allows."""
        with _quiet_torch():
            from torch._C._distributed_c10d import PrefixStore, TCPStore

        self.member = member
        self.patience = patience or Patience()
        try:
            socket.getaddrinfo(member.master_addr, member.master_port)
        except OSError as error:
            raise LaunchError(
                f"{member.describe()}: the host of number 0, {member.master_addr}, does not resolve on this "
                f"machine ({error.strerror}): set MASTER_ADDR to a name or an address that every node can reach"
            ) from error
        try:
            store: Store = TCPStore(
                member.master_addr,
                member.master_port,
                is_master=member.leads and not member.has_store,
                timeout=timedelta(seconds=self.patience.meet),
                wait_for_workers=False,
            )
        except (
            RuntimeError,
            ValueError,
        ) as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
            raise LaunchError(
                f"{member.describe()}: no rendezvous with the others at {member.master_addr}:{member.master_port} "
                "within "
                f"{self.patience.meet:g} s ({str(error).splitlines()[0]}); check that the name resolves to the "
                "machine of number 0 and that its port is free, or set MASTER_ADDR and MASTER_PORT"
            ) from error
        self._round = uuid.uuid4().hex
        self._hall: Store = PrefixStore("zerokit-bench", store)
        if member.has_store and not member.leads:
            self._round = self._enter()
        self._store: Store = PrefixStore(self._round if member.has_store else "", self._hall)
        self._heard: dict[int, tuple[object, float]] = {}
        self._closed = threading.Event()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hangs = False
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._serve, self._beat)]
        for thread in self._threads:
            thread.start()

    def _enter(self) -> str:
        """Ask the leader for the name of this meeting, and wait for the answer.

        torchrun's store outlives the ranks, and after a restart still holds the messages of the former ones.
        """
        index, token, deadline = self.member.index, uuid.uuid4().hex, time.monotonic() + self.patience.meet
        self._hall.set(f"hello/{index}", token)
        while time.monotonic() < deadline:
            if self._hall.check([f"welcome/{index}"]):
                answered, _, name = self._hall.get(f"welcome/{index}").decode().partition(" ")
                if answered == token:
                    return name
            time.sleep(POLL_SECONDS)
        raise LaunchError(
            f"{self.member.describe()}: number 0 has not joined within {self.patience.meet:g} s: see what it said"
        )

    def admit(self, index: int) -> None:
        """Answer another member that asks to join, if any, as the leader."""
        if not self.member.has_store:
            return

        def answer() -> None:
            if self._hall.check([f"hello/{index}"]):
                token = self._hall.get(f"hello/{index}").decode()
                self._hall.set(f"welcome/{index}", f"{token} {self._round}")

        self._call(answer)

    def _beat(self) -> None:
        with contextlib.suppress(LaunchError):  # the next use of the store raises
            self.put(f"alive/{self.member.index}", at=time.time())
            while not self._closed.wait(self.patience.alive):
                self.put(f"alive/{self.member.index}", at=time.time())

    def close(self) -> None:
        """Stop the signs of life."""
        self._closed.set()
        self._calls.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def put(self, key: str, **content: Any) -> None:
        """Write a key; raises `LaunchError` if the store is gone."""
        text = json.dumps(content)

        def write() -> None:
            if len(text) <= _PIECE_CHARACTERS:
                self._store.set(key, text)
                return
            starts = range(0, len(text), _PIECE_CHARACTERS)
            for number, start in enumerate(starts):
                self._store.set(f"{key}/piece/{number}", text[start : start + _PIECE_CHARACTERS])
            self._store.set(key, json.dumps(len(starts)))

        self._call(write)

    def get(self, key: str) -> dict[str, Any] | None:
        """The value of a key; None if it is not set. Raises `LaunchError` if the store is gone."""

        def read() -> dict[str, Any] | None:
            if not self._store.check([key]):
                return None
            value = json.loads(self._store.get(key))
            if isinstance(value, int):
                pieces = (self._store.get(f"{key}/piece/{number}") for number in range(value))
                value = json.loads(b"".join(pieces))
            content: dict[str, Any] = value
            return content

        return self._call(read)

    def _call(self, call: Callable[[], _T]) -> _T:
        """Use the store; a thread does, since a call to a machine that hangs never returns."""
        answer: queue.SimpleQueue[_T | RuntimeError] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            result = answer.get(timeout=0.0 if self._hangs else self.patience.lost)
        except queue.Empty:
            self._hangs = True  # later calls would wait behind this one
            result = RuntimeError(f"no answer for {self.patience.lost:g} s")
        if isinstance(result, RuntimeError):
            raise LaunchError(f"{self.member.describe()}: the others are unreachable: {result}") from result
        return result

    def _serve(self) -> None:
        while (queued := self._calls.get()) is not None:
            call, answer = queued
            try:
                answer.put(call())
            except RuntimeError as error:
                answer.put(error)

    def is_lost(self, index: int) -> bool:
        """Whether a member has shown no sign of life for too long."""
        beat, now = self.get(f"alive/{index}"), time.monotonic()
        if index not in self._heard or self._heard[index][0] != beat:
            self._heard[index] = beat, now
        return now - self._heard[index][1] > self.patience.lost

    def dismiss(self, code: int) -> None:
        """End the others with this exit code, as the leader."""
        self.put("end", code=code)
        deadline = time.monotonic() + GRACE_SECONDS
        # The store lives in this process: a member that has not read it yet would lose it.
        for index in range(1, self.member.count):
            while (
                self.get(f"gone/{index}") is None and not self.is_lost(index) and time.monotonic() < deadline
            ):
                time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """While torch is imported: its C++ half logs many lines for every store that is gone, and we one."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]  # ranks log as they like
