"""A `Pattern`: a way to train that people use, and at which stages it is right or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar
from zlib import crc32

from torch import Tensor, nn

from tests.runtime.patterns.engines import SMALL, STEPS, Engine, Setting, Way
from tests.runtime.patterns.models import Features, Mlp

STAGES = (0, 1, 2, 3)
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Refused:
    """An error of class `error` whose message contains all of `words`."""

    error: str
    words: tuple[str, ...]
    everywhere: bool = True
    """Whether every rank raises it; else some rank does, and the others may end in any way."""
    or_right: bool = False
    """Whether being right will do as well."""

    def __str__(self) -> str:
        wording = ", ".join(f"`{word}`" for word in self.words)
        return (
            f"{'right, or ' if self.or_right else ''}refused: {self.error}{': ' if wording else ''}{wording}"
        )


def usage(*words: str, **options: Any) -> Refused:
    return Refused("UsageError", words, **options)


def always(refusal: Refused) -> dict[int, Refused]:
    """At every stage."""
    return dict.fromkeys(STAGES, refusal)


OUTSIDE: Mapping[int, Refused] = {3: usage("gathered()")}
"""Whole parameters are read or changed where stage 3 has none."""


@dataclass(frozen=True)
class Verdict:
    """What became of a pattern on one rank: "right", "wrong" with what differs, or "raised"."""

    kind: str
    detail: str = ""
    errors: tuple[str, ...] = ()
    """Names of the exception's classes, the most derived first."""
    trace: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, *self.errors[:1], self.detail)))


@dataclass(frozen=True)
class Pattern:
    """How to build and train a model, once for plain torch and for zerokit."""

    key: str
    subject: str
    name: str
    train: Callable[[Engine], None]
    build: Callable[[], nn.Module]
    refused: Mapping[int, Refused] = field(default_factory=dict)
    """By stage; it is right at all others."""
    world: int = 2
    params: Callable[[nn.Module], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the ZeroOptimizer, and a learning rate for both."""
    reference: str = "plain"
    """What it is compared with: "plain" torch, or "stage 0" of zerokit where torch has nothing like it."""
    tolerance: float = 2e-6
    """Relative and absolute."""
    equal_bits: bool = True
    """Whether what is right at two stages is the same to the last bit."""
    apart: bool = False
    """Whether a refusal leaves the ranks out of step, so that the next setting needs new processes."""
    timeout: float = 20.0
    """Seconds that a message may take; a busy machine delays ranks that are in step, too."""

    def settings(self, *, full: bool = False) -> list[Setting]:
        """Stage 3 and another by turns, and a stage for each other outcome that is declared; all products if `full`.

        Optimizers and buckets take turns: the reference is computed once, and neither changes what a pattern asks of
        the hooks.
        """
        if full:
            return [Setting(*each) for each in product(STAGES, (SMALL, None), ("adamw", "sgd"))]
        turn = crc32(self.key.encode())
        turn, optimizer = turn // 2, ("adamw", "sgd")[turn % 2]
        turn, other = turn // 3, turn % 3
        buckets = ((SMALL, None), (None, SMALL), (SMALL, SMALL))[turn % 3]
        chosen = [other, 3]
        declared = {self.refused.get(stage) for stage in chosen}
        for stage in STAGES:
            if self.refused.get(stage) not in declared:
                declared.add(self.refused.get(stage))
                chosen.append(stage)
        # What is refused is asked of units that stand alone: joined ones may well be right.
        return [
            Setting(stage, SMALL if stage == 0 or stage in self.refused else buckets[stage == 3], optimizer)
            for stage in sorted(chosen)
        ]

    def on_device(self, *, full: bool = False) -> list[Setting]:
        """The same the device's way: backward in a thread of its own in every other pattern, or both if `full`."""
        ways: tuple[Way, ...] = ("device", "threads")
        chosen = ways if full else [ways[crc32(self.key.encode()) // 18 % 2]]
        return [replace(setting, way=way) for way in chosen for setting in self.settings(full=full)]

    def on_mesh(self) -> Setting | None:
        """One pair of stages on a mesh of two by two ranks, by turns; None for what wants ranks of its own kind."""
        if self.world != 2 or self.apart or not self.options.keys().isdisjoint(("process_group", "every")):
            return None
        turn = crc32(self.key.encode())
        outer, inner = ((0, 3), (1, 3), (2, 2), (3, 3))[turn % 4]
        return Setting(inner, SMALL, ("adamw", "sgd")[turn // 4 % 2], outer)

    def accepts(self, setting: Setting, verdicts: list[Verdict]) -> bool:
        """Whether what became of all ranks is as declared."""
        right = all(verdict.kind == "right" for verdict in verdicts)
        refusal = self.refused.get(setting.stage)
        if refusal is None or (right and refusal.or_right):
            return right
        raised = [
            refusal.error in verdict.errors and all(word in verdict.detail for word in refusal.words)
            for verdict in verdicts
        ]
        return all(raised) if refusal.everywhere else any(raised)


PATTERNS: dict[str, Pattern] = {}

Train = Callable[[Engine], None]
Build = Callable[[], nn.Module]


def updates(loss: Callable[[Engine], Tensor], max_norm: float | None = None, steps: int = STEPS) -> Train:
    """Trains by a few updates of such losses, clipped to `max_norm`."""

    def train(engine: Engine) -> None:
        for engine.number in range(steps):
            engine.update(loss(engine), max_norm)

    return train


def usual(*shape: int, max_norm: float | None = None) -> Train:
    """Trains by the mean square of what the model makes of data of this shape."""
    return updates(lambda engine: engine.loss(*shape), max_norm)


USUAL, CLIPPED = usual(), usual(max_norm=0.1)


class Subject:
    """Registers the patterns of one module, by decorators or for what trains in many of them.

    pattern = Subject(__name__)
    pattern("dropout", lambda: nn.Sequential(nn.Dropout(), Block()))(CLIPPED, "dropout")
    """

    def __init__(self, module: str) -> None:
        self._name = module.rpartition(".")[2]

    def __call__(self, name: str, build: Build = Mlp, **options: Any) -> Callable[..., Train]:
        """Registers a whole training."""

        def register(train: Train, key: str = "") -> Train:
            key = f"{self._name}.{key or train.__name__}"
            assert key not in PATTERNS, key
            PATTERNS[key] = Pattern(key, self._name, name, train, build, **options)
            return train

        return register

    def each_step(
        self, name: str, build: Build = Mlp, *, steps: int = STEPS, **options: Any
    ) -> Callable[..., Train]:
        """Registers what is done in each of a few steps, of which `engine.number` is one."""

        def register(step: Train, key: str = "") -> Train:
            def train(engine: Engine) -> None:
                for engine.number in range(steps):
                    step(engine)

            return self(name, build, **options)(train, key or step.__name__)

        return register

    def model(self, name: str, train: Train = CLIPPED, **options: Any) -> Callable[[type[M]], type[M]]:
        """Registers a class of models, which are trained in the usual way."""

        def register(build: type[M]) -> type[M]:
            self(name, build, **options)(train, build.__name__.lower())
            return build

        return register

    def features(self, name: str, train: Train = CLIPPED, **options: Any) -> Callable[[Features], Features]:
        """Registers a function of an `Mlp` and its input, which takes the place of `Mlp.features`."""

        def register(features: Features) -> Features:
            self(name, lambda: Mlp(features=features), **options)(train, features.__name__)
            return features

        return register
