"""`Copies`: node-local checkpoints that are saved in the background as part of `step()`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerokit.checkpoint.frozen import Frozen
from zerokit.checkpoint.save import save
from zerokit.checkpoint.together import Saving, Together, is_saving
from zerokit.errors import CheckpointError, UsageError, ZerokitWarning
from zerokit.files import path_of
from zerokit.runtime import ZeroOptimizer


class Copies:
    """Saves every so many steps into the nodes' own directories, with copies of each node's files on others.

        extra = zerokit.load(["/dev/shm/run", "run"], optimizer) if … else {"step": 0}
        copies = zerokit.Copies(optimizer, "/dev/shm/run", copies=2, every=10, step=extra["step"])
        …
        copies.wait()  # before the process group is destroyed

    `optimizer.step()` then copies its state into host memory every `every` steps, and the rest happens beside the
    training, as `zerokit.save(..., shared=False, blocking=False)` does it. A copy that is due while the last one is
    under way is made as soon as that has ended, and a warning says which `every` the link could follow. A copy that
    fails, such as in a full memory, is a warning, and the training goes on: the one before it is still there.

    Args:
        optimizer: it has at most one `Copies`, and no islands.
        path: the run's directory of each node, in memory (`/dev/shm/run`) or on a disk of the node.
        copies: on how many nodes each file is, the own one included.
        every: steps from one copy to the next.
        extra: called with the number of steps made, inside `step()`; what it returns is saved, and `load` returns it.
            What it raises, `step()` raises, on all ranks.
        step: the steps that were made before, such as those that a load has gone on from.
        frozen: "never" leaves frozen parameters out, as in `save`: `load` takes them from the model as it was built.

    Raises `UsageError` for arguments that are out of range.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        path: str | os.PathLike[str],
        *,
        copies: int = 2,
        every: int = 10,
        extra: Callable[[int], Any] | None = None,
        step: int = 0,
        frozen: Frozen = "always",
    ) -> None:
        if not isinstance(optimizer, ZeroOptimizer):
            raise UsageError(
                f"the first argument is a {type(optimizer).__name__}: pass the ZeroOptimizer, "
                "zerokit.Copies(optimizer, path)"
            )
        if optimizer.islands is not None:
            raise UsageError("Copies of islands are not made: each island saves into a directory of its own")
        for name, value, least in (("copies", copies, 1), ("every", every, 1), ("step", step, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}: expected an integer, at least {least}")
        if frozen not in ("always", "never"):
            raise UsageError(f'frozen={frozen!r}: expected "always" or "never"')
        if extra is not None and not callable(extra):
            raise UsageError(f"extra={extra!r}: expected a function of the number of steps made")
        if optimizer.copies is not None:
            raise UsageError("this optimizer has copies already: use optimizer.copies, or stop() it first")
        self.step = step
        """Steps made so far. Set it after a load amid the training."""
        self.saved: int | None = None
        """The step of the newest copy that is complete on all nodes."""
        self.seconds: float | None = None
        """How long that copy was under way."""
        self._path, self._copies, self._every, self._extra = path_of(path), copies, every, extra
        self._frozen: Frozen = frozen
        # It holds this object: a cycle would keep the model's memory.
        self._optimizer = weakref.ref(optimizer)
        self._saving: Saving | None = None
        self._begun = step
        self._due = self._late = False
        self._said = ""
        optimizer.copies = self

    def after_step(self) -> None:
        """Note a step, and begin a copy if one is due. `step()` calls it, on all ranks."""
        self.step += 1
        self._due = self._due or self.step % self._every == 0
        optimizer = self._optimizer()
        if not self._due or optimizer is None:
            return
        together = Together(optimizer.runtime.collectives)
        # The program's own saves, too: none is waited for inside a step.
        under_way = together.exchange(
            (is_saving(optimizer), self._saving is not None and not self._saving.done())
        )
        self._late = self._late or any(late for _, late in under_way)
        if any(map(any, under_way)):
            return
        self._end(first=together.rank == 0)
        self._begin(optimizer, together)

    def wait(self) -> Path | None:
        """Wait for the copy that is under way; its directory, or that of the last one.

        None if there is none yet. Raises as `Saving.wait` does.
        """
        if self._saving is None:
            return None
        path = self._saving.wait()
        self.saved, self.seconds = self._begun, self._saving.seconds
        return path

    def stop(self) -> None:
        """Make no more copies. What is there stays, and a copy that is under way ends."""
        if (optimizer := self._optimizer()) is not None and optimizer.copies is self:
            optimizer.copies = None

    def _begin(self, optimizer: ZeroOptimizer, together: Together) -> None:
        self._due, self._begun = False, self.step
        # Its errors are the program's, and raised; on all ranks, so that none waits for the others.
        extra = together.each(lambda: None if self._extra is None else self._extra(self.step))
        try:
            self._saving = save(
                self._path,
                optimizer,
                step=self.step,
                extra=extra,
                overwrite=True,
                blocking=False,
                shared=False,
                copies=self._copies,
                frozen=self._frozen,
            )
        except CheckpointError as error:
            self._warn(f"step {self.step} has no copies: {error}", first=together.rank == 0)
        else:
            self._saving.leave_failure_to_owner()

    def _end(self, *, first: bool) -> None:
        """Take notice of how the last copy has ended."""
        if self._saving is None:
            return
        error, seconds, late = self._saving.exception(), self._saving.seconds, self._late
        self._saving, self._late = None, False
        if error is not None:
            self._warn(f"step {self._begun} has no copies: {error}", first=first)
            return
        self.saved, self.seconds = self._begun, seconds
        if late:
            taken = self.step - self._begun
            self._warn(
                f"every={self._every} is too small: a copy is under way for up to {taken} steps, so the link allows "
                f"one in {taken} steps, and a lost node costs as many",
                first=first,
            )

    def _warn(self, text: str, *, first: bool) -> None:
        if first and text != self._said:
            self._said = text
            warnings.warn(f"{self._path}: {text}", ZerokitWarning, stacklevel=5)
