"""What a queue is asked for, and a submitted job until its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from zerokit.errors import UsageError
from zerokit.interrupts import Interrupts
from zerokit.launch.failures import LaunchError
from zerokit.patience import Patience
from zerokit.text import without_secrets, without_secrets_named

FOLLOW_SECONDS = 2.0
# A busy controller, an API server that is being replaced, and a laptop that slept leave some questions unanswered.
ANSWER_SECONDS = 120.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every queue is asked for.

    Attributes:
        nodes, ranks: how many, and ranks of each node.
        gpus_per_node: GPUs of each; None asks for none.
        cpus_per_task: cores of each rank; None leaves them open.
        memory: of each node, as the queue writes sizes.
        variables: of the ranks.
    """

    nodes: int
    ranks: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def refuse_secrets(self, command: Sequence[str], where: str, instead: str) -> None:
        """Raise `UsageError` if a password or a token is in a variable or in a word of the command."""
        secret = [name for name, text in self.variables.items() if without_secrets_named(name, text) != text]
        secret += ["the command" for word in command if without_secrets(word) != word]
        if secret:
            raise UsageError(f"the password in {secret[0]} would appear in the {where}: {instead}")


class NoAnswer(LaunchError):
    """The queue has not answered a question, and may do so later."""


@dataclass(frozen=True, slots=True)
class State:
    """What the queue says of a job, as text and as `facts`."""

    text: str
    ended: bool
    facts: Mapping[str, str] = field(default_factory=dict)


def ask(question: Callable[[], _T], interrupts: Interrupts, otherwise: str) -> _T:
    """Ask until there is an answer.

    Raises `LaunchError` after two minutes without one: the job is left to itself, and `otherwise` says how to watch it.
    """
    patience = Patience(ANSWER_SECONDS)
    while True:
        try:
            return question()
        except NoAnswer as error:
            interrupts.check()  # a Ctrl-C at the terminal also ends the command that asks
            if patience.over:
                waited = f"no answer for {ANSWER_SECONDS:g} s: {error}"
                raise LaunchError(f"{waited}; the job continues: {otherwise}") from error
        interrupts.wait(FOLLOW_SECONDS)


def await_end(
    state: Callable[[], State], interrupts: Interrupts, job: str, show: Callable[[str], None]
) -> State:
    """Wait until a job has ended; returns its last state. `show` gets each new one behind the `job`'s name.

    Raises `Interrupted` after SIGINT or SIGTERM.
    """
    shown = ""
    while not (now := state()).ended:
        if now.text != shown:
            show(f"{job}{now.text}")
            shown = now.text
        interrupts.wait(FOLLOW_SECONDS)
    return now
