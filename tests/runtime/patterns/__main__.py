"""`python -m tests.runtime.patterns`: try patterns and tell what became of them, or write the table."""

from __future__ import annotations

import argparse

from tests.runtime.patterns.catalogue import PATH, PATTERNS, render
from tests.runtime.patterns.running import jobs_of, launches, try_out


def main() -> None:
    """Without arguments, tries all patterns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of keys; by default all patterns")
    parser.add_argument("--write", action="store_true", help="write the table and try nothing")
    parser.add_argument("--full", action="store_true", help="all products of stages, buckets and optimizers")
    parser.add_argument("--mesh", action="store_true", help="two by two ranks, with pairs of stages by turns")
    parser.add_argument("--device-way", action="store_true", help="results arrive late, as on a device")
    arguments = parser.parse_args()
    if arguments.write:
        PATH.write_text(render())
        return
    for key, pattern in PATTERNS.items():
        if arguments.keys and not key.startswith(tuple(arguments.keys)):
            continue
        jobs = jobs_of(key, full=arguments.full, on_device=arguments.device_way)
        if arguments.mesh:
            setting = pattern.on_mesh()
            jobs = [] if setting is None else [(key, setting)]
        found = list(filter(None, map(try_out, launches(jobs))))
        print("\n".join([f"{key}: {'not as declared' if found else 'as declared'}", *found]), flush=True)


if __name__ == "__main__":
    main()
