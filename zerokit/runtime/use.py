"""The use of a unit in a pass: whether its whole parameters are there, and how many of its modules are at work."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The state of a unit's whole parameters in this pass."""

    FREED = "only the shard has memory"
    GATHERING = "on their way, or there and not used yet"
    READY = "in use"
    HELD = "in use, and kept until backward ends: no hook will show when backward has read them"


class UnitUse:
    """A unit's state in this pass, and its modules at work."""

    def __init__(self) -> None:
        self.state = State.READY
        self.active = 0  # how many of the unit's modules are at work, one inside the other

    def enter(self) -> None:
        """Note that one of the unit's modules is at work."""
        self.active += 1

    def leave(self) -> bool:
        """Note the return from a module. Returns whether it was the outermost one at work."""
        self.active = max(self.active - 1, 0)
        return not self.active

    def rest(self) -> None:
        """Note that none of the unit's modules is at work."""
        self.active = 0

    def note_gather(self) -> None:
        """Note a gather, of a unit that may still be in use."""
        if self.state is State.FREED:
            self.state = State.GATHERING

    def note_use(self) -> None:
        """Note a use of the gathered unit."""
        if self.state is State.GATHERING:
            self.state = State.READY

    def note_free(self) -> None:
        """Note that only the shard has memory."""
        self.state = State.FREED

    def hold(self) -> None:
        """Keep the gathered unit until backward ends."""
        self.state = State.HELD

    def begin_pass(self) -> None:
        """Note that the pass that begins has not used the gathered unit."""
        if self.state is State.READY:
            self.state = State.GATHERING
