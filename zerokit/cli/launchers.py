"""Chooses what starts ranks, from `launcher_options` and the environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerokit.cli.launcher_options import OPTIONS_OF
from zerokit.cluster.hosts import HostSlots, equal_slots, read_hostfile
from zerokit.errors import UsageError
from zerokit.text import printable

if TYPE_CHECKING:
    from zerokit.bench.run.session import Launch
    from zerokit.cluster.joined import Leader
    from zerokit.cluster.membership import Membership
    from zerokit.interrupts import Interrupts


def is_given(context: click.Context, name: str) -> bool:
    """Whether an option is given on the command line or in the sweep file."""
    sources = click.core.ParameterSource
    return context.get_parameter_source(name) in (sources.COMMANDLINE, sources.DEFAULT_MAP)


def given_arguments(
    context: click.Context, without: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[str]:
    """The command line `without` these parameters, or with `only` these; a sweep file is replaced by its options."""
    arguments: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        wanted = name not in without and (only is None or name in only)
        if not wanted or not isinstance(parameter, click.Option) or not is_given(context, name):
            continue
        value = context.params[name]
        if parameter.is_flag:
            arguments += (parameter.opts if value else parameter.secondary_opts)[:1]
            continue
        for one in value if parameter.multiple else (value,):
            text = ",".join(map(str, one)) if isinstance(one, tuple | list) else str(one)
            arguments += [parameter.opts[0], text]
    return arguments


@dataclass(frozen=True)
class Chosen:
    """What starts the ranks, and its options.

    Attributes:
        name: of the launcher.
        nodes: how many there are, unless the user chooses; None where only the user can.
        slots: the ranks of each.
        here: whether all ranks share this machine, so that what it has is looked at before any is started.
        options: of the command line.
        hosts: for ssh and Slurm.
        member: where another launcher has started ranks.
    """

    name: str
    options: Mapping[str, Any]
    nodes: int | None = None
    slots: Sequence[HostSlots] = ()
    here: bool = True
    hosts: tuple[str, ...] = ()
    member: Membership | None = None

    @property
    def nproc_per_node(self) -> int | None:
        """Ranks of every node, to be asked for where the user chooses none; raises `UsageError` if slots differ."""
        return equal_slots(self.slots)

    @property
    def submits(self) -> bool:
        """Whether the bench runs as a queued job."""
        return self.name == "kubernetes" or (self.name == "slurm" and not self.hosts)

    def require_world(self, nodes: int, nproc_per_node: int) -> None:
        """Raise `UsageError` if there are no hosts for so many nodes, or other ranks have been started."""
        if self.member is not None:
            self.member.require_world(nodes, nproc_per_node)
        if self.hosts and nodes > len(self.hosts):
            raise UsageError(
                f"--nodes {nodes} needs that many hosts, but there are {len(self.hosts)}: {', '.join(self.hosts)}"
            )

    def launch(self, interrupts: Interrupts, leader: Leader | None) -> Launch:
        """The function that starts ranks."""
        if leader is not None:
            return partial(leader.launch, interrupts=interrupts)
        if self.name in ("ssh", "slurm"):
            launch: Launch = partial(self._launch_on, interrupts)
        else:
            from zerokit.launch import local

            launch = partial(local.launch, interrupts=interrupts)
        return partial(_followed, launch) if self.options["follow"] else launch

    def _launch_on(
        self,
        interrupts: Interrupts,
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        **more: Any,
    ) -> None:
        from zerokit.cluster.remote import launch_on
        from zerokit.cluster.slurm import Container, node_address, srun_host
        from zerokit.cluster.ssh import ssh_address, ssh_host

        options = self.options
        python = options["remote_python"] or sys.executable
        self.require_world(nodes, nproc_per_node)
        hosts = self.hosts[:nodes]
        address = options["master_addr"]
        if self.name == "ssh":
            words = _ssh_words(options)
            machines = [ssh_host(host, words, python, options["connect_timeout"]) for host in hosts]
            address = address or ssh_address(hosts[0], words)
        else:
            image = options["container_image"]
            container = Container(image, options["container_runtime"]) if image else None
            machines = [srun_host(host, python, container) for host in hosts]
            address = address or node_address(hosts[0])
        launch_on(
            machines,
            module,
            arguments,
            nproc_per_node=nproc_per_node,
            interrupts=interrupts,
            environment=read_variables(options["variables"]),
            master_addr=address,
            connect_seconds=options["connect_timeout"],
            follow=options["follow"],
            **more,
        )


def _followed(
    launch: Launch, *what: Any, log_dir: Path, poll: Callable[[], None], to_stderr: bool = True, **more: Any
) -> None:
    """A launch whose ranks' output is shown, on stderr alone or each stream on its own."""
    from zerokit.launch.logs import RankLogs

    def show(line: str, stream: str) -> None:
        click.echo(printable(line), err=to_stderr or stream == "stderr")

    logs = RankLogs(log_dir, show)

    def look() -> None:
        poll()
        logs.look()

    try:
        launch(*what, log_dir=log_dir, poll=look, **more)
    finally:
        logs.look(last=True)


def read_variables(given: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` with this process's value; raises `UsageError` for a name that has none."""
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: this variable is not set here; give it as {name}=VALUE")
        if not name.isidentifier():
            raise UsageError(f"--env {text}: {name!r} is not a valid variable name")
        variables[name] = value if equals else os.environ[name]
    return variables


def choose_launcher(
    options: Mapping[str, Any], environment: Mapping[str, str], *, elastic: bool = False
) -> Chosen:
    """The launcher from the options and the environment; raises `UsageError` if they contradict each other.

    An `elastic` bench joins torchrun's one rank, too: the others may have been lost, or come later.
    """
    from zerokit.cluster.membership import find_membership

    name = options["launcher"]
    member = find_membership(environment) if name in (None, "env") else None
    if name == "env" and member is None:
        raise UsageError(
            "--launcher env joins ranks that are already running, but no variables of torchrun, srun, mpirun or "
            "a TrainJob are set: start zerokit with one of these, or use another launcher"
        )
    one_of_many = elastic and "TORCHELASTIC_RUN_ID" in environment
    if name is None and member is not None and member.count == 1 and not one_of_many:
        member = None  # a shell inside srun, say: nothing has been started that could be joined
    name = name or ("env" if member is not None else "local")
    context = click.get_current_context()
    for option in context.command.params:
        whose = OPTIONS_OF.get(key := option.name or "", (name,))
        # A profile's ZEROKIT_BENCH_PARTITION is for whoever launches with Slurm; a job's ranks have it as well.
        if name in whose or not is_given(context, key) or options[key] in (option.default, None, (), False):
            continue
        raise UsageError(f"{option.opts[0]} is for --launcher {' or '.join(whose)}, not for {name}")
    read_variables(options["variables"])
    if elastic and name not in ("local", "env"):
        raise UsageError(
            f"--elastic needs ranks on this machine, or torchrun, which restarts ranks; it does not work with {name}"
        )
    if member is not None:
        from zerokit.bench.machine.host import visible_devices

        slots = (HostSlots("each", member.nproc_per_node),)
        # A rank that sees one device says nothing of the others', which may see one each (srun --gpus-per-task).
        here = member.nodes == 1 and len(visible_devices()) != 1
        return Chosen(name, options, member.nodes, slots, here=here, member=member)
    if name == "ssh":
        return _ssh(options)
    if name == "slurm":
        from zerokit.cluster.slurm import allocated_hosts

        if "SLURM_JOB_ID" in environment and not options["dry_run"]:
            hosts = tuple(allocated_hosts(environment))
            return Chosen(name, options, len(hosts), here=False, hosts=hosts)
        return Chosen(name, options, here=False)
    return Chosen(name, options, here=name == "local")


def _ssh_words(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The options for ssh as a shell splits them; raises `UsageError` for a quotation without an end."""
    try:
        return tuple(word for line in options["ssh_option"] for word in shlex.split(line))
    except ValueError as error:
        raise UsageError(f"--ssh-option {' '.join(options['ssh_option'])}: {error}") from error


def _ssh(options: Mapping[str, Any]) -> Chosen:
    from zerokit.cluster.ssh import require_ssh

    if (options["hosts"] is None) == (options["hostfile"] is None):
        raise UsageError("--launcher ssh needs the nodes' hosts: give --hosts a,b or --hostfile FILE")
    if options["hostfile"] is not None:
        lines = read_hostfile(options["hostfile"])
    else:
        names = [name.strip() for name in options["hosts"].split(",")]
        if not all(names) or any(name.startswith("-") for name in names):
            raise UsageError(f"--hosts {options['hosts']} is not a list of hosts; expected a,b")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(
                f"--hosts {options['hosts']} names {twice} twice: each node must be a different machine"
            )
        lines = [HostSlots(name, None) for name in names]
    _ssh_words(options)  # before ranks are asked for
    require_ssh()
    hosts = tuple(line.host for line in lines)
    return Chosen("ssh", options, len(hosts), lines, here=False, hosts=hosts)


def join(chosen: Chosen, command_line: Sequence[str], run: Callable[[Leader | None], int]) -> int:
    """Take part in a run of processes that another launcher has started.

    Args:
        chosen: with the member that this process is.
        command_line: of this process, which must be the same on all.
        run: what the leader does; returns the exit code.

    Returns the leader's exit code, on all of them.
    """
    from zerokit.cluster.joined import follow, lead
    from zerokit.interrupts import Interrupts
    from zerokit.launch.processes import end_with_parent

    member = chosen.member
    assert member is not None
    if "TORCHELASTIC_RUN_ID" in os.environ or member.scheme != "torchrun":
        end_with_parent()  # not for nohup, with torchrun's variables set by hand
    if member.leads:
        click.echo(f"zerokit: {member.describe()} leads", err=True)
    with Interrupts() as interrupts:
        if not member.leads:
            return follow(member, command_line, interrupts)
        with lead(member, command_line, interrupts) as leader:
            try:
                leader.code = run(leader)
            except click.ClickException as error:
                leader.code = error.exit_code
                raise
    return leader.code
