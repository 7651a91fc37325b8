r"""Ranks that another launcher has started: torchrun, srun or mpirun (see `membership`).

    process 0 (leads)    zerokit bench ... -- launch -- rank 0
    process 1 (follows)  zerokit bench ... -- serve --- rank 1

Every process is started with one command. The first executes it; the others serve its launches. Ranks are fresh
processes in each launch, and meet at a port of their own. The store in which process 0 and the others meet is
torchrun's, or one of process 0.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokit.cluster import mail
from zerokit.cluster.leader import LOOK, Member, dismiss, meet, start_ranks
from zerokit.cluster.mail import LEADER, Mail
from zerokit.cluster.member import serve
from zerokit.cluster.membership import Membership
from zerokit.errors import UsageError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.agents import conduct
from zerokit.launch.failures import LaunchError, name_node
from zerokit.launch.ranks import World
from zerokit.network import free_port
from zerokit.text import without_secrets

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Leader:
    """Starts launches on all members, one after the other. They exit with `code`, unless an error ends this process."""

    def __init__(self, member: Membership, members: Mapping[int, Member]) -> None:
        self._member, self._members = member, members
        self.code = 0

    def launch(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        log_dir: Path,
        interrupts: Interrupts,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `python -m module arguments` on every member's rank and wait for all of them; see `remote.launch_on`.

        Raises `UsageError` when these are not as many ranks as the members have.
        """
        member = self._member
        member.require_world(nodes, nproc_per_node)
        address, port = member.master_addr, free_port("")
        if member.on_one_machine:
            address, port = "127.0.0.1", free_port()
        world = World(nodes, nproc_per_node, address, port)
        agents = start_ranks(self._members, world, 1, [module, *arguments], log_dir)
        conduct(agents, log_dir, interrupts, poll)


@contextlib.contextmanager
def lead(member: Membership, command_line: Sequence[str], interrupts: Interrupts) -> Iterator[Leader]:
    """Wait until all members have come, each with the same `command_line`, and send them home at the end.

    Raises `UsageError` when one has another, and `LaunchError` when one does not come or runs another program.
    """
    numbers = range(1, member.count)
    with Mail(_store(member), LEADER, map(str, numbers), mail.MEET_SECONDS) as letters:
        members = {number: _Joined(letters, number, member) for number in numbers}
        leader = Leader(member, members)
        try:
            meet([*members.values()], interrupts)
            for one in members.values():
                _compare(one, list(command_line))
            yield leader
        except UsageError:
            leader.code = 2
            raise
        except Interrupted as error:
            leader.code = 128 + error.signal_number
            raise
        except BaseException:
            leader.code = leader.code or 1
            raise
        finally:
            dismiss([*members.values()], leader.code)


def _compare(one: Member, command_line: list[str]) -> None:
    if one.hello["asked"] != command_line:
        theirs, ours = (without_secrets(shlex.join(words)) for words in (one.hello["asked"], command_line))
        raise UsageError(
            f"all ranks must run the same command, but {one.where} was given {theirs!r}, and number 0 {ours!r}"
        )


class _Joined(Member):
    """A process that another launcher has started."""

    def __init__(self, letters: Mail, number: int, member: Membership) -> None:
        super().__init__(letters.peers[str(number)], f"number {number} of {member.count}")
        self._letters, self._number, self._member = letters, number, member

    def greet(self, hello: Mapping[str, Any]) -> None:
        super().greet(hello)
        self.host = None if hello["host"] == socket.gethostname() else hello["host"]
        node = self._member.node_of(self._number)
        self.where = f"rank {self._number} of {self._member.count}, {name_node(node, self.host)}"

    def explain_silence(self) -> str:
        member, trouble = self._member, self._letters.trouble
        if self.hello:
            stuck = member.has_store and self._letters.stuck
            return _explain_store(member) if stuck else super().explain_silence()
        if trouble is not None:
            return str(_unmet(member, trouble))
        return (
            f"{self.where} that {member.scheme} started has not joined within {mail.MEET_SECONDS:g} s: look at its "
            f"output, and check that it reaches {member.master_addr}:{member.master_port}"
        )


def follow(member: Membership, command_line: Sequence[str], interrupts: Interrupts) -> int:
    """Serve the leader's launches until it is done; returns the leader's exit code.

    Raises `LaunchError` if the leader is gone, or does not come.
    """
    with Mail(_store(member), str(member.index), [LEADER], mail.MEET_SECONDS) as letters:
        leader = letters.peers[LEADER]
        try:
            return serve(leader, list(command_line), interrupts.check)
        except EOFError:
            interrupts.check()
            if not leader.met:
                raise _unmet(member, letters.trouble) from letters.trouble
            if member.has_store and letters.stuck:
                raise LaunchError(f"{member.describe()}: {_explain_store(member)}") from None
            raise LaunchError(
                f"{member.describe()}: number 0 is gone, or has not responded for {mail.SILENCE_SECONDS:g} s: {LOOK}"
            ) from None


def _store(member: Membership) -> Callable[[], Store]:
    """The function that makes or finds the store. Raises `LaunchError` if its port is taken."""
    if member.has_store:
        # torchrun's own outlives restarted ranks, and what the former ones said there. Its agents do not count restarts
        # alike.
        connect = mail.join_store(member.master_addr, member.master_port)
        return mail.begin_round(connect) if member.leads else mail.join_round(connect)
    if not member.leads:
        return mail.join_store(member.master_addr, member.master_port, member.job)
    try:
        store, _ = mail.host_store(member.master_port, member.job)
    except RuntimeError as error:
        raise LaunchError(
            f"{member.describe()} cannot listen at port {member.master_port}, where the others look for it "
            f"({str(error).splitlines()[0]}): set MASTER_PORT to one that is free"
        ) from error
    return store


def _explain_store(member: Membership) -> str:
    return (
        f"{member.scheme}'s store at {member.master_addr}:{member.master_port} does not respond any more: the agent "
        f"that has it was killed or is stopped, or its machine or the network between is gone: {LOOK}"
    )


def _unmet(member: Membership, error: Exception | None) -> LaunchError:
    place = f"{member.master_addr}:{member.master_port}"
    if isinstance(error, socket.gaierror):
        return LaunchError(
            f"{member.describe()}: the host of number 0, {member.master_addr}, does not resolve on this machine "
            f"({error.strerror}): set MASTER_ADDR to a name or an address that every node can reach"
        )
    why = str(error).splitlines()[0] if error is not None and str(error) else "it does not respond"
    return LaunchError(
        f"{member.describe()}: no rendezvous with the others at {place} within {mail.MEET_SECONDS:g} s ({why}); check "
        "that the name resolves to the machine of number 0 and that its port is free, or set MASTER_ADDR and "
        "MASTER_PORT"
    )
