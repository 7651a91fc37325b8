"""Runs patterns: on the ranks, beside the reference; and in the parent, which starts ranks until all is tried."""

from __future__ import annotations

import dataclasses
import gc
import json
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.runtime.patterns.catalogue import PATTERNS
from tests.runtime.patterns.engines import Engine, Journal, Plain, Setting
from tests.runtime.patterns.harness import Pattern, Verdict
from tests.support.distributed import Outcome, run_ranks_expecting_errors
from tests.support.training import digest, seed_host

Job = tuple[str, Setting]
"""A pattern's key and how to run it."""
Tried = dict[Job, list[Verdict]]


class BrokenPattern(Exception):
    """The reference itself fails."""


class Interrupted(Exception):
    """The ranks may be out of step. The message holds the verdicts so far, as JSON."""


# ---- on the ranks


def run_jobs(jobs: list[Job]) -> str:
    """Verdicts of this rank, as JSON. Raises `Interrupted` after a job that went otherwise than declared."""
    # A group of its own, so that ranks find each other even where a pattern left collectives behind.
    control = dist.new_group(timeout=timedelta(seconds=PATTERNS[jobs[0][0]].timeout + 20))
    references: dict[tuple[str, str], tuple[list[float], list[dict[str, Tensor]]]] = {}
    bits: dict[tuple[str, str], list[str]] = {}
    verdicts: list[Verdict] = []
    for key, setting in jobs:
        pattern = PATTERNS[key]
        if (key, setting.optimizer) not in references:
            references[key, setting.optimizer] = _reference(pattern, setting)
        verdict, exact = _try(pattern, setting, *references[key, setting.optimizer])
        if exact and pattern.equal_bits and exact != bits.setdefault((key, setting.optimizer), exact):
            verdict = Verdict("wrong", "the bits are not those of another stage")
        verdicts.append(verdict)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, verdict, group=control)
        raised = any(other.kind == "raised" for other in everyone)
        if raised and (pattern.apart or not pattern.accepts(setting, everyone)):
            raise Interrupted(_dump(verdicts))
        gc.collect()
    return _dump(verdicts)


def _reference(pattern: Pattern, setting: Setting) -> tuple[list[float], list[dict[str, Tensor]]]:
    try:
        if pattern.reference == "plain":
            journal = _train(pattern, setting, Plain)
        else:
            journal = _train(pattern, dataclasses.replace(setting, stage=0, outer=None), Engine)
        assert journal.numbers, f"{pattern.key} records nothing"
    except Exception as error:
        raise BrokenPattern(f"{pattern.key}: the reference fails: {error!r}") from error
    return journal.numbers, journal.weights()


def _train(pattern: Pattern, setting: Setting, cls: type[Engine]) -> Journal:
    seed_host(5)
    model = pattern.build()
    params = pattern.params(model) if pattern.params else None
    engine = cls(model, setting, params=params, options=dict(pattern.options))
    seed_host(50 + engine.rank)  # dropout differs by rank
    pattern.train(engine)
    return engine.journal


def _try(
    pattern: Pattern, setting: Setting, numbers: list[float], weights: list[dict[str, Tensor]]
) -> tuple[Verdict, list[str]]:
    """What became of it; if it is right, its exact numbers and weights."""
    try:
        journal = _train(pattern, setting, Engine)
        found = journal.weights()
    except Exception as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
        return Verdict("raised", str(error), names, traceback.format_exc()), []
    difference = _differ(numbers, journal.numbers, weights, found, pattern.tolerance)
    if difference:
        return Verdict("wrong", difference), []
    return Verdict("right"), [*map(float.hex, journal.numbers), *(digest(state.items()) for state in found)]


def _differ(
    numbers: list[float],
    found_numbers: list[float],
    weights: list[dict[str, Tensor]],
    found_weights: list[dict[str, Tensor]],
    tolerance: float,
) -> str:
    if len(numbers) != len(found_numbers):
        return f"{len(found_numbers)} numbers instead of {len(numbers)}"
    for place, (expected, number) in enumerate(zip(numbers, found_numbers, strict=True)):
        if not abs(expected - number) <= tolerance * (1 + abs(expected)):
            return f"number {place} is {number!r} instead of {expected!r}"
    for state, found in zip(weights, found_weights, strict=True):
        if state.keys() != found.keys():
            return f"names {sorted(state.keys() ^ found.keys())}"
        for name, tensor in state.items():
            if tensor.shape != found[name].shape:
                return f"{name}: shape {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
            expected_, other = tensor.double(), found[name].double()
            gap = (expected_ - other).abs()
            if not bool((gap <= tolerance * (1 + expected_.abs())).all()):
                return f"{name} is off by {gap.max().item():.3g}"
    return ""


def _dump(verdicts: list[Verdict]) -> str:
    return json.dumps([dataclasses.asdict(verdict) for verdict in verdicts])


# ---- in the parent


def jobs_of(key: str, *, full: bool = False) -> list[Job]:
    """What is to be tried of a pattern."""
    return [(key, setting) for setting in PATTERNS[key].settings(full=full)]


def try_out(jobs: list[Job]) -> Tried:
    """What becomes of every job, in processes that no earlier one has left out of step.

    As many as possible run in the same processes.
    """
    pending = list(jobs)
    tried: Tried = {}
    one_by_one = False
    while pending:
        pattern = PATTERNS[pending[0][0]]
        count = 1 if one_by_one else _together(pending)
        outcomes = run_ranks_expecting_errors(
            pattern.world if pending[0][1].outer is None else 4,
            run_jobs,
            pending[:count],
            timeout=pattern.timeout,
        )
        if any(outcome.raised("BrokenPattern") for outcome in outcomes):
            raise AssertionError("\n".join(outcome.describe() for outcome in outcomes))
        found = [_load(outcome) for outcome in outcomes]
        done = min(len(verdicts) for verdicts in found)
        one_by_one = done == 0 and count > 1  # a rank died or hung: find out in which job
        if one_by_one:
            continue
        if done == 0:
            found, done = [[_death(outcome)] for outcome in outcomes], 1
        for place in range(done):
            tried[pending[place]] = [verdicts[place] for verdicts in found]
        del pending[:done]
    return tried


def _together(jobs: list[Job]) -> int:
    """How many of these may begin in the same processes."""
    first = PATTERNS[jobs[0][0]]
    for count, (key, setting) in enumerate(jobs):
        pattern = PATTERNS[key]
        alone = pattern.apart and setting.stage in pattern.refused
        other = (pattern.world, pattern.timeout, setting.outer is None)
        if other != (first.world, first.timeout, jobs[0][1].outer is None) or (alone and count):
            return count
        if alone:
            return 1
    return len(jobs)


def _load(outcome: Outcome) -> list[Verdict]:
    text = outcome.value if outcome.ok else outcome.error if outcome.raised("Interrupted") else "[]"
    return [Verdict(**{**item, "errors": tuple(item["errors"])}) for item in json.loads(text)]


def _death(outcome: Outcome) -> Verdict:
    names = outcome.error_types or ("NoAnswer",)
    return Verdict("raised", outcome.error or f"exit code {outcome.exitcode}", names, outcome.describe())


def complaints(tried: Tried) -> list[str]:
    """Jobs that went otherwise than declared."""
    found = []
    for (key, setting), verdicts in tried.items():
        pattern = PATTERNS[key]
        if not pattern.accepts(setting, verdicts):
            declared = pattern.refused.get(setting.stage, "right")
            lines = [f"{key}, {setting}: declared {declared}"]
            lines += [
                f"  rank {rank}: {' '.join(str(verdict).split())}" for rank, verdict in enumerate(verdicts)
            ]
            lines += [verdict.trace for verdict in verdicts if verdict.trace][:1]
            found.append("\n".join(lines))
    return found
