"""The page of a check, for benchmarks/results/, from the lines that it left.

    python -m benchmarks.gpu_check.report OUT/results.jsonl --output benchmarks/results/2026-12-01-h100.md

Of a part that ran several times the last run with figures counts. What is missing is said. The last table is made for
the README.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.bars import FLOOR, MODEL, Parts, bars, rows_of, to_floor
from benchmarks.measuring import read_options

MEASURING = {
    "cells-a": "Engines on one GPU",
    "cells-b": "More engines on one GPU",
    "eighth": "One rank of eight",
    "host": "The host's time",
    "compile": "Compiled blocks",
}
"""The parts with rows, and their titles."""
_TRACED = ("launches", "copies", "exposed_ms", "communication_ms")
_README = (FLOOR, "FSDP2 3", "DDP", "zerokit 1", "zerokit 2", "zerokit 3")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a results.jsonl; an unfinished last one, of a check that was killed, is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]


def latest(lines: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Each part's last line with data, else its last line, in the order of the first ones."""
    found: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if line["part"] not in found or line["data"] is not None or found[line["part"]]["data"] is None:
            found[line["part"]] = line
    return found


def page(lines: Sequence[Mapping[str, Any]], *, date: str, command: str) -> str:
    """The page, in Markdown."""
    runs = latest(lines)
    parts = {name: line["data"] for name, line in runs.items() if line["data"] is not None}
    machine = parts.get("env")
    if machine is None:
        about = "The part env is missing: device, driver and torch are not known."
    else:
        names = ("device", "driver", "torch", "cuda", "nccl", "python")
        about = ", ".join(f"{name} {machine.get(name) or 'unknown'}" for name in names)
    text = [f"# A check on one GPU, {date}", "", about, "", f"    {command}", ""]
    text += ["## Bars", "", *_bars(parts), ""]
    for name, title in MEASURING.items():
        text += [f"## {title} (`{name}`)", ""]
        text += _rows(parts[name]) if name in parts else ["Not measured."]
        text.append("")
    text += ["## Parts", "", *_parts(runs), ""]
    text += ["## Lines for the README", "", *readme_lines(parts), ""]
    return "\n".join(text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown, without columns that are empty in every row."""
    used = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    cells = [columns, ["---"] * len(columns), *rows]
    return [
        f"| {' | '.join(row[at].replace('|', chr(92) + '|').replace(chr(10), ' ') for at in used)} |"
        for row in cells
    ]


def _bars(parts: Parts) -> list[str]:
    rows = [
        [one.what, "" if one.figure is None else f"{one.figure:.3f}", f"{one.most:g}", one.verdict]
        for one in bars(parts)
    ]
    return table(["what", "figure", "at most", ""], rows)


def _rows(data: Mapping[str, Any]) -> list[str]:
    """The tables of a part's rows, one a model, and what was left out."""
    text: list[str] = []
    rows = data.get("rows", ())
    for model in dict.fromkeys(row["model"] for row in rows):
        beside = [row for row in rows if row["model"] == model]
        first = beside[0]
        text += [
            f"{model}: {first['parameters']:,} parameters, {first['tokens']:,} tokens a rank and step.",
            "",
        ]
        columns = [list(_cells(row, beside)) for row in beside]
        text += table([name for name, _ in columns[0]], [[cell for _, cell in row] for row in columns])
        text.append("")
    if used := next((row["mfu"] for row in rows if row.get("mfu")), None):
        text += [
            f"MFU is of {used['peak_flops_per_s'] / 1e12:g} TFLOP/s, dense {used['precision']} ({used['device']}), "
            f"at {rows[0]['flops_formula']}.",
            "",
        ]
    if data.get("wire_bytes_per_s"):
        text += [f"Collectives take their bytes over {data['wire_bytes_per_s'] / 1e9:g} GB/s.", ""]
    if data.get("left_out"):
        text += [
            "Left out: " + "; ".join(f"{name} ({why})" for name, why in data["left_out"].items()) + ".",
            "",
        ]
    return text[:-1] if text else ["No rows."]


def _cells(row: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    traced = row.get("trace", {})
    yield "engine", row["row"]
    yield "step, ms", f"{row['median_ms']:.2f}"
    yield "÷ floor", _number(to_floor(row, beside), 3)
    yield "eager, ms", _number(row.get("eager_ms"), 2)
    yield "frames compiled", _number(row.get("frames"), 0)
    yield "frames given up", _number(row.get("frames_given_up"), 0)
    yield "tokens/s", f"{row['tokens_per_s']:,.0f}"
    yield "MFU", f"{row['mfu']['mfu']:.1%}" if row.get("mfu") else ""
    yield "host, ms", _number(row.get("host_process_ms"), 2)
    yield "loop returned, ms", _number(row.get("host_returned_ms"), 2)
    yield "peak, GiB", _gib(row.get("peak_allocated_bytes"))
    yield "planned, GiB", _gib(row.get("planned_peak_bytes"))
    yield "reserved, GiB", _gib(row.get("peak_reserved_bytes"))
    yield "device, GiB", _gib(row.get("device_used_bytes"))
    for name in _TRACED:
        yield name.replace("_ms", ", ms"), _number(traced.get(name), 2 if name.endswith("_ms") else 0)
    yield "waits", "" if row.get("waits") is None else str(max(len(row["waits"]), traced.get("syncs", 0)))


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def _parts(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        [name, "ok" if line["ok"] else "FAILED", f"{line['seconds']:.0f}", line["error"] or ""]
        for name, line in runs.items()
    ]
    rows += [[name, "not run", "", ""] for name in MEASURING if name not in runs]
    return table(["part", "", "seconds", "error"], rows)


def readme_lines(parts: Parts) -> list[str]:
    """The table of engines on `MODEL`: one line an engine that was measured."""
    rows: dict[str, list[str]] = {}
    for part in ("cells-a", "cells-b"):
        beside = rows_of(parts, part, MODEL)
        for row in beside:
            if row["row"] in _README:
                cells = [f"{row['median_ms']:.1f}", _number(to_floor(row, beside), 3)]
                cells.append(_gib(row.get("peak_allocated_bytes")))
                rows.setdefault(row["row"], [row["row"], *cells])
    if not rows:
        return [f"{MODEL} was not measured."]
    ordered = [rows[name] for name in _README if name in rows]
    return table(["engine", "step, ms", f"÷ {FLOOR}", "peak memory, GiB"], ordered)


def main(words: Sequence[str] | None = None) -> None:
    """Write or print the page."""
    options = read_options(
        __doc__,
        words,
        _results=(Path, "the results.jsonl of a check"),
        output=(Path, "the file of the page; printed by default"),
        command=("scripts/gpu-check --short", "how the check was started"),
        date=(str, "of the check; by default the file's"),
    )
    written = datetime.fromtimestamp(options.results.stat().st_mtime, UTC)
    text = page(
        read_lines(options.results),
        date=options.date or written.date().isoformat(),
        command=options.command,
    )
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
