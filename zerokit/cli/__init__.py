"""The command line: thin modules, one a command or a few commands of one kind, imported when one is called.

Exit codes: 0 ok, 1 failure, 2 usage or a path that does not exist, 3 regression, 4 nothing could run, 5 doctor found a
fault; a command that a signal ended leaves with 128 + its number, as shells do. diff: 1 different, 2 cannot be read.
"""

from __future__ import annotations

import codecs
import difflib
import errno
import io
import os
import signal
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

import click

from zerokit import __version__
from zerokit.errors import UsageError, ZerokitError, ZerokitWarning
from zerokit.interrupts import Interrupted
from zerokit.text import printable, printable_lines

# Name, and the line that `zerokit --help` shows without importing the command.
COMMANDS = {
    "bench": "Train models with several engines, measure them, write records, a report and MLflow runs.",
    "launch": "Start a program of your own as the bench starts its ranks: here, over ssh, in Slurm or Kubernetes.",
    "plan": "Predict which stages and meshes fit, how fast they are, and which to choose.",
    "compare": "Compare benches: figures, differences, noise, and a page with pictures.",
    "push": "Write records on disk to MLflow.",
    "reshard": "Cut a checkpoint for another number of ranks.",
    "convert": "Write a checkpoint of DeepSpeed, FSDP2 (DCP), Hugging Face or zerokit in another format.",
    "consolidate": "Write a checkpoint's weights as safetensors for Hugging Face's loaders.",
    "gather": "Make one run of nodes' own directories, which lie on several machines or are copies.",
    "inspect": "Show what a checkpoint holds: parameters, streams, files.",
    "verify": "Read every byte of a checkpoint and report damage.",
    "doctor": "Find what would make training fail, hang or crawl: software, network, disks, tracking.",
    "prune": "Remove a run's older steps and the files of killed writers.",
    "diff": "Compare two checkpoints of any world sizes, without reading their data.",
}
_MODULES = {
    **dict.fromkeys(("reshard", "convert", "consolidate", "gather"), "conversions"),
    **dict.fromkeys(("inspect", "verify", "prune", "diff"), "checkpoints"),
}


class _Commands(click.Group):
    """A group whose commands live in `zerokit.cli.<name>` as `command`, or together in one module by their names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"zerokit.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name if cmd_name in _MODULES else "command")
        for one in command.params:
            if isinstance(one, click.Option):  # click's own names follow the parameter, not the option
                one.envvar = (
                    f"ZEROKIT_{cmd_name}_{max(one.opts, key=len).lstrip('-').replace('-', '_')}".upper()
                )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for a mistyped one."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Exit with the signal's code on interruption, also during imports; click would exit with 1.

        A `UsageError` is shown as one of the command line that led to it, with exit code 2. What click says may quote
        values of a file or a variable.
        """
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise click.UsageError(printable(error.format_message()), error.ctx) from error
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        except UsageError as error:
            name = str(ctx.invoked_subcommand)
            command = self.get_command(ctx, name) or self
            raise click.UsageError(printable(str(error)), click.Context(command, ctx, name)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""Every option can be set in the environment: ZEROKIT_BENCH_STAGE is bench's --stage.

    Completion in bash, for commands, options and values, also after a comma (zsh and fish: zsh_source, fish_source):

    eval "$(_ZEROKIT_COMPLETE=bash_source zerokit)"
    """,
)
@click.version_option(__version__, prog_name="zerokit")
def cli() -> None:
    """ZeRO training for PyTorch: benchmarks against its peers, and checkpoints for any number of ranks."""


_show_others = warnings.showwarning


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """zerokit's own warnings as plain text, as its errors are; others with the line that they come from."""
    if not issubclass(category, ZerokitWarning):
        _show_others(message, category, filename, lineno, file, line)
        return
    from zerokit.cli.work import note

    note([str(message)])


def _prepare_streams() -> None:
    """Open the standard streams that the caller has closed, and let stdout take any text, as stderr does.

    A file that is opened would have the number of a closed one, and be written to by whatever writes there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # UTF-8 lacks only the bytes of names that are not UTF-8
        unicode = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "backslashreplace")


def main() -> None:
    """The program `zerokit`: its own errors are shown as plain text, without a traceback."""
    if (
        os.getpid() == 1
    ):  # a container's first process, which the kernel ends by no signal that has no handler
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    _prepare_streams()
    warnings.simplefilter("always", ZerokitWarning)
    warnings.showwarning = _show
    try:
        cli(prog_name="zerokit")
    except ZerokitError as error:
        text = printable_lines(str(error)) if error.several_lines else printable(str(error))
        click.echo(f"zerokit: {text}", err=True)
        sys.exit(1)
    except OSError as error:
        # A file that does not exist has a name; the working directory and a folder for temporary files have none.
        missing = error.errno == errno.ENOENT and error.filename is None
        if not missing and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG):
            raise
        gone = "the working directory" if error.strerror == os.strerror(errno.ENOENT) else ""
        where = f": {printable(str(error.filename or gone))}" if error.filename or gone else ""
        click.echo(f"zerokit: {error.strerror}{where}", err=True)
        with suppress(OSError):  # Python would try again at its end, and leave with 120
            sys.stdout.close()
        sys.exit(1)
    except Interrupted as error:
        click.echo(f"zerokit: {error}", err=True)
        sys.exit(128 + error.signal_number)
