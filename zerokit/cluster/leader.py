"""The leader's side of a launch on other machines: its members, and an agent for the ranks of each.

leader    meet -- launch ------------------- conduct -- dismiss
member    hello       start -- ranks -- exit            end, bye
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zerokit.cluster import mail
from zerokit.cluster.folders import pack_folder, put_file
from zerokit.cluster.mail import Message, Peer
from zerokit.errors import ZerokitError
from zerokit.interrupts import Interrupts
from zerokit.launch.agents import GRACE_SECONDS, POLL_SECONDS, Agent, await_end
from zerokit.launch.failures import Failure, LaunchError
from zerokit.launch.ranks import Ranks, World, describe_machine
from zerokit.patience import Patience
from zerokit.versions import describe_difference

_END_SECONDS = 10.0
_OTHERS_SECONDS = 1.0
LOOK = "look at that machine (dmesg tells what the kernel killed), then start again"


class Lost(LaunchError):
    """A member is gone."""


class Member:
    """A process that serves this one's launches.

    `where` names it in messages, and `host` its machine; None if that is this one. `hello` is what it said of itself,
    and `lost` why it is not heard any more.
    """

    def __init__(self, peer: Peer, where: str, host: str | None = None) -> None:
        self.peer, self.where, self.host = peer, where, host
        self.hello: Mapping[str, Any] = {}
        self.lost: str | None = None

    def hear(self) -> Message | None:
        """Its next message, if any; raises `Lost`, with the reason, if it is gone."""
        try:
            message = self.peer.hear()
        except EOFError:
            self.lost = self.lost or self.explain_silence()
            raise Lost(self.lost) from None
        if message is not None and message[0] == "left":  # nothing more will come
            self.lost = f"{self.where} has ended: {message[1]['why']}"
            self.peer.leave()
            return None
        if message is not None and message[0] == "hello":
            self.greet(message[1])
            return None
        return message

    def greet(self, hello: Mapping[str, Any]) -> None:
        """Take what it says of itself."""
        self.hello = hello

    def explain_silence(self) -> str:
        """The reason of a member that is not heard."""
        return (
            f"{self.where}: nothing was heard of it for {mail.SILENCE_SECONDS:g} s: its program was killed or is "
            f"stopped, or its machine or the network between is gone: {LOOK}"
        )


def meet(members: Sequence[Member], interrupts: Interrupts, remedy: str = "") -> None:
    """Wait until all have said who they are.

    Raises `LaunchError` if some are gone before, or if one does not have this machine's versions, with a `remedy`.
    """
    patience: Patience | None = None
    while missing := [one for one in members if not one.hello]:
        interrupts.check()
        troubles = []
        for one in missing:
            try:
                one.hear()
            except Lost as error:
                troubles.append(str(error))
                patience = patience or Patience(
                    _OTHERS_SECONDS
                )  # others that fail by the same cause are named too
        if patience is not None and (patience.over or len(troubles) == len(missing)):
            raise LaunchError("\n".join(troubles))
        time.sleep(POLL_SECONDS)
    for one in members:
        if (difference := describe_difference(one.where, one.hello.get("versions"))) is not None:
            raise LaunchError(", ".join(filter(None, (difference, remedy))))


def dismiss(members: Sequence[Member], code: int) -> None:
    """Send them home with this exit code, and wait until they have heard it."""
    for one in members:
        one.peer.say("end", code=code)
    patience, left = Patience(GRACE_SECONDS), list(members)
    while left and not patience.over:
        for one in list(left):
            try:
                if (message := one.hear()) is not None and message[0] == "bye":
                    left.remove(one)
            except Lost:
                left.remove(one)
        time.sleep(POLL_SECONDS)


class MemberAgent:
    """The ranks of a member in one launch, as an `Agent`."""

    def __init__(self, member: Member, launch: str, log_dir: Path) -> None:
        self._member, self._launch, self._log_dir = member, launch, log_dir
        self.failures: list[Failure] = []
        self.trouble: str | None = None
        self.note: str | None = None
        self._code: int | None = None

    @property
    def mute(self) -> bool:
        """Whether nothing is heard of it for now."""
        return self._member.peer.mute

    def poll(self) -> int | None:
        try:
            while self._code is None and (message := self._member.hear()) is not None:
                kind, content = message
                if content.get("launch") == self._launch:  # else of one that was given up
                    self._take(kind, content)
        except Lost as error:
            self._fail(str(error))
        except (KeyError, TypeError, ValueError, OSError, ZerokitError) as error:
            self._fail(f"{self._member.where}: what it sent could not be kept: {error}")
        return self._code

    def _take(self, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "file":
            put_file(self._log_dir, **content["file"])
        elif kind == "exit":
            self.failures = [replace(Failure(**one), host=self._member.host) for one in content["failures"]]
            self.note = content["note"] and f"{self._member.where}: {content['note']}"
            self._code = int(content["code"])

    def _fail(self, trouble: str) -> None:
        self._code, self.trouble = 1, trouble

    def send_signal(self, number: int) -> None:
        self._member.peer.say("signal", number=number)

    def end(self) -> None:
        if self.poll() is None:
            self.send_signal(9)
            await_end([self], _END_SECONDS)


def start_ranks(
    members: Mapping[int, Member],
    world: World,
    each: int,
    command: Sequence[str],
    log_dir: Path,
    *,
    follow: bool = False,
) -> list[Agent]:
    """Start all ranks of a launch.

    Args:
        members: by number. Where there is no number 0, this process has its ranks.
        world: what ranks are told, without `threads`: cores are shared by all processes of their machine.
        each: ranks of each member, in the order of numbers.
        command: the module that each rank runs, and its arguments; those in `log_dir` become paths in the copies.
        log_dir: the launch's folder: its files are copied to every member, and what ranks write there comes back.
        follow: whether logs come back while they grow.
    """
    launch, files, agents = uuid.uuid4().hex, pack_folder(log_dir), list[Agent]()
    hellos = {0: describe_machine()} | {number: one.hello for number, one in members.items()}
    for number, threads in zip(hellos, share_cores(list(hellos.values()), each), strict=True):
        ranks, own = range(number * each, (number + 1) * each), replace(world, threads=threads)
        if (member := members.get(number)) is None:
            agents.append(Ranks(own, ranks, command, log_dir))
            continue
        member.peer.say(
            "start",
            launch=launch,
            world=asdict(own),
            ranks=[ranks.start, ranks.stop],
            command=list(command),
            folder=str(log_dir),
            files=files,
            follow=follow,
        )
        agents.append(MemberAgent(member, launch, log_dir))
    return agents


def share_cores(hellos: Sequence[Mapping[str, Any]], each: int) -> list[int]:
    """The threads of each rank, from `host` and `cores` of processes with so many ranks; shared cores are divided."""
    shares = []
    for one in hellos:
        sharing = sum(
            other["host"] == one["host"] and not set(one["cores"]).isdisjoint(other["cores"])
            for other in hellos
        )
        shares.append(max(1, len(one["cores"]) // (sharing * each)))
    return shares
