"""`python -m tests.runtime.patterns`: try patterns and tell what became of them, or write the table."""

from __future__ import annotations

import argparse

from tests.runtime.patterns.catalogue import PATTERNS
from tests.runtime.patterns.harness import Pattern
from tests.runtime.patterns.running import Tried, complaints, jobs_of, try_out
from tests.runtime.patterns.table import PATH, render


def main() -> None:
    """Without arguments, tries all patterns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of keys; by default all patterns")
    parser.add_argument("--write", action="store_true", help="write the table and try nothing")
    parser.add_argument(
        "--full", action="store_true", help="all stages, buckets and optimizers in all products"
    )
    parser.add_argument("--mesh", action="store_true", help="two by two ranks, with pairs of stages by turns")
    parser.add_argument("--traces", action="store_true", help="show tracebacks")
    parser.add_argument("--timeout", type=float, default=4.0, help="of collectives, in seconds")
    arguments = parser.parse_args()
    if arguments.write:
        PATH.write_text(render())
        return
    for key, pattern in PATTERNS.items():
        if arguments.keys and not key.startswith(tuple(arguments.keys)):
            continue
        jobs = jobs_of(key, full=arguments.full)
        if arguments.mesh:
            setting = pattern.on_mesh()
            jobs = [] if setting is None else [(key, setting)]
        tried = try_out(jobs, timeout=arguments.timeout)
        found = complaints(tried)
        print(f"{key}: {'as declared' if not found else 'not as declared'}", flush=True)
        for line in found if arguments.traces else _in_short(pattern, tried):
            print(f"  {line}", flush=True)


def _in_short(pattern: Pattern, tried: Tried) -> list[str]:
    """What went otherwise than declared, each outcome once with its settings."""
    outcomes: dict[str, list[str]] = {}
    for (_, setting), verdicts in tried.items():
        if not pattern.accepts(setting, verdicts):
            worst = min(verdicts, key=lambda verdict: ("raised", "wrong", "right").index(verdict.kind))
            words = " ".join(str(worst).split())[:200]
            outcomes.setdefault(words, []).append(
                f"{setting.stage}{'' if setting.bucket_mb else ' default'} {setting.optimizer}"
            )
    return [f"{', '.join(settings)}: {words}" for words, settings in outcomes.items()]


if __name__ == "__main__":
    main()
