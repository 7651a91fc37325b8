"""How many steps of a training were left out, as the runtime counts them and checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skips:
    """Steps that were left out: `total`, and how many of them came last, `in_a_row`; 0 after a step that was made."""

    total: int = 0
    in_a_row: int = 0

    def after(self, *, skipped: bool) -> Skips:
        """The count after another step."""
        return Skips(self.total + 1, self.in_a_row + 1) if skipped else Skips(self.total)


NONE_SKIPPED = Skips()
