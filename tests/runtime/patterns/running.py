"""Runs patterns: on the ranks, beside the reference; and in the parent, which starts the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import traceback
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.runtime.patterns.catalogue import PATTERNS
from tests.runtime.patterns.engines import Engine, Plain, Setting
from tests.runtime.patterns.harness import Pattern, Verdict
from tests.support.distributed import run_ranks_expecting_errors
from tests.support.streams import ComparingStream, LastingMemory, backward_in_a_thread, device_way
from tests.support.training import digest, seed_host

Job = tuple[str, Setting]
"""A pattern's key and how to run it."""
Result = tuple[list[float], list[dict[str, Tensor]]]
"""The numbers that a run recorded, and the weights and buffers of each of its models."""


class Interrupted(Exception):
    """The ranks may be out of step. The message holds the complaints so far."""


# ---- on the ranks


def run_jobs(jobs: list[Job]) -> str:
    """What went otherwise than declared, on any rank; raises `Interrupted` with it after what leaves ranks apart."""
    # A group of its own, so that ranks find each other even where a pattern left collectives behind.
    control = dist.new_group(timeout=timedelta(seconds=PATTERNS[jobs[0][0]].timeout + 20))
    references: dict[tuple[object, ...], Result] = {}
    bits: dict[tuple[object, ...], list[str]] = {}
    complaints = []
    for key, setting in jobs:
        pattern, case = PATTERNS[key], (key, setting.optimizer, setting.way == "threads")
        if case not in references:
            references[case] = _reference(pattern, setting)
        verdict, exact = _try(pattern, setting, references[case])
        if exact and pattern.equal_bits and exact != bits.setdefault(_alike(pattern, setting), exact):
            verdict = Verdict("wrong", "the bits are not those of another stage")
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, verdict, group=control)
        accepted = pattern.accepts(setting, everyone)
        if not accepted:
            complaints.append(_complaint(pattern, setting, everyone))
        if any(other.kind == "raised" for other in everyone) and (pattern.apart or not accepted):
            raise Interrupted("\n\n".join(complaints))
        gc.collect()
    return "\n\n".join(complaints)


def _alike(pattern: Pattern, setting: Setting) -> tuple[object, ...]:
    """What settings share that are to give equal bits.

    On devices sums over more than two ranks are in no certain order, and buckets change it.
    """
    ordered = setting.way == "host" or pattern.world == 2
    return pattern.key, setting.optimizer, setting.way, ordered or setting.bucket_mb


def _complaint(pattern: Pattern, setting: Setting, verdicts: list[Verdict]) -> str:
    lines = [f"{pattern.key}, {setting}: declared {pattern.refused.get(setting.stage, 'right')}"]
    lines += [f"  rank {rank}: {' '.join(str(verdict).split())}" for rank, verdict in enumerate(verdicts)]
    lines += [verdict.trace for verdict in verdicts if verdict.trace][:1]
    return "\n".join(lines)


def _reference(pattern: Pattern, setting: Setting) -> Result:
    # Nodes that backward makes are numbered by thread, and so are sums over their gradients ordered.
    with backward_in_a_thread() if setting.way == "threads" else contextlib.nullcontext():
        if pattern.reference == "plain":
            found = _train(pattern, setting, Plain)
        else:
            found = _train(pattern, dataclasses.replace(setting, stage=0, outer=None), Engine)
    assert found[0], f"{pattern.key} records nothing"
    return found


def _train(pattern: Pattern, setting: Setting, cls: type[Engine]) -> Result:
    seed_host(5)
    model = pattern.build()
    params = pattern.params(model) if pattern.params else None
    engine = cls(model, setting, params=params, options=dict(pattern.options))
    seed_host(50 + engine.rank)  # dropout differs by rank
    pattern.train(engine)
    return engine.journal.numbers, [one.weights() for one in engine.journal.engines]


def _try(pattern: Pattern, setting: Setting, reference: Result) -> tuple[Verdict, list[str]]:
    """What became of it; if it is right, its exact numbers and weights."""
    try:
        with _way(setting):
            numbers, weights = found = _train(pattern, setting, Engine)
    except Exception as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
        return Verdict("raised", str(error), names, traceback.format_exc()), []
    difference = _differ(reference, found, pattern.tolerance)
    if difference:
        return Verdict("wrong", difference), []
    return Verdict("right"), [*map(float.hex, numbers), *(digest(state.items()) for state in weights)]


@contextlib.contextmanager
def _way(setting: Setting) -> Iterator[None]:
    """Inside, optimizers take the setting's way."""
    with contextlib.ExitStack() as way:
        if setting.way != "host":
            way.enter_context(device_way(ComparingStream, LastingMemory))
        if setting.way == "threads":
            way.enter_context(backward_in_a_thread())
        yield


def _differ(reference: Result, found: Result, tolerance: float) -> str:
    if len(reference[0]) != len(found[0]):
        return f"{len(found[0])} numbers instead of {len(reference[0])}"
    for place, (expected, number) in enumerate(zip(reference[0], found[0], strict=True)):
        if not abs(expected - number) <= tolerance * (1 + abs(expected)):
            return f"number {place} is {number!r} instead of {expected!r}"
    for state, others in zip(reference[1], found[1], strict=True):
        if state.keys() != others.keys():
            return f"names {sorted(state.keys() ^ others.keys())}"
        for name, tensor in state.items():
            wanted, other = tensor.double(), others[name].double()
            if wanted.shape != other.shape:
                return f"{name}: shape {tuple(other.shape)} instead of {tuple(wanted.shape)}"
            gap = (wanted - other).abs()
            if not bool((gap <= tolerance * (1 + wanted.abs())).all()):
                return f"{name} is off by {gap.max().item():.3g}"
    return ""


# ---- in the parent


def jobs_of(key: str, *, full: bool = False, on_device: bool = False) -> list[Job]:
    """What is to be tried of a pattern, as on a host or the device's way."""
    pattern = PATTERNS[key]
    settings = pattern.on_device(full=full) if on_device else pattern.settings(full=full)
    return [(key, setting) for setting in settings]


def launches(jobs: Iterable[Job], most: int = 40) -> list[list[Job]]:
    """The jobs that share processes: those of a subject or way on as many ranks.

    What leaves its ranks out of step is alone.
    """
    together: dict[tuple[object, ...], list[Job]] = {}
    for key, setting in jobs:
        pattern = PATTERNS[key]
        alone = (key, setting) if pattern.apart and setting.stage in pattern.refused else None
        subject = pattern.subject if setting.outer is None else "on two axes"
        subject = subject if setting.way == "host" else "the device's way"
        kind = (subject, pattern.world, pattern.timeout, alone)
        together.setdefault(kind, []).append((key, setting))
    return [
        alike[start : start + most] for alike in together.values() for start in range(0, len(alike), most)
    ]


def try_out(jobs: list[Job]) -> str:
    """What went otherwise than declared in one launch, whose first unexpected error ends it."""
    key, setting = jobs[0]
    world = PATTERNS[key].world if setting.outer is None else 4
    outcomes = run_ranks_expecting_errors(world, run_jobs, jobs, timeout=PATTERNS[key].timeout)
    broken = [outcome for outcome in outcomes if not (outcome.ok or outcome.raised("Interrupted"))]
    if broken:
        return "\n".join(outcome.describe() for outcome in broken)
    return str(outcomes[0].value) if outcomes[0].ok else outcomes[0].error
