"""Runs parts one after the other, and keeps what each of them found as soon as it has ended.

OUT/results.jsonl   a line for each part: part, ok, seconds, error, data
OUT/log.txt         what the parts printed, as they printed it
OUT/traces.tar.gz   the traces that they left

The table of all parts is printed again after each part, so that the output's last 12,000 characters hold it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_check.parts import Entry
from benchmarks.gpu_check.process import Job, Outcome, run_job

TABLE_CHARACTERS = 11_000
TRACES_BYTES = 15 << 20
_PATIENCE = 20
"""A host that tries the parts may be slow: their limits there only end what hangs."""


class Check:
    """A run of parts.

    Args:
        out: an existing folder, which gets the files; what it has already is added to.
        device: "cuda" or "cpu".
        budget_s: a part starts only if its expected seconds fit into what is left of these seconds.
    """

    def __init__(self, out: Path, device: str, budget_s: float) -> None:
        self._out, self._device = out, device
        self._end = time.monotonic() + budget_s
        self._rows: dict[str, list[str]] = {}
        self._traces = _read(out / "traces.tar.gz")
        self._room = TRACES_BYTES - sum(map(_packed, self._traces.values()))

    def run(self, parts: Sequence[Entry]) -> bool:
        """Runs the parts that fit; returns whether all that ran are well."""
        self._rows = {part.name: ["-", "", ""] for part in parts}
        well, shown = True, ""
        with tempfile.TemporaryDirectory(prefix="zerokit-gpu-check-", ignore_cleanup_errors=True) as scratch:
            for number, part in enumerate(parts):
                left_s = self._end - time.monotonic()
                if part.expected_s > left_s:
                    self._rows[part.name][2] = (
                        f"not started: {part.expected_s:.0f} s expected, {max(0.0, left_s):.0f} left"
                    )
                    continue
                folder = Path(scratch, f"{number}-{part.name}")
                folder.mkdir()
                on_gpu = self._device == "cuda"
                limit_s = min(part.limit_s, left_s) if on_gpu else part.limit_s * _PATIENCE
                job = Job(part.name, part.function, self._device, str(folder), limit_s)
                print(f"gpu-check: {part.name} …", flush=True)
                outcome = run_job(job, self._log)
                self._keep(outcome, folder)
                well &= outcome.ok
                shown = self.table()
                print(shown, flush=True)
        if self.table() != shown:  # the last ones did not start
            print(self.table(), flush=True)
        return well

    def _log(self, text: bytes) -> None:
        with (self._out / "log.txt").open("ab") as log:
            log.write(text)

    def _keep(self, outcome: Outcome, folder: Path) -> None:
        with (self._out / "results.jsonl").open("a") as results:
            results.write(json.dumps(asdict(outcome)) + "\n")
            results.flush()
            os.fsync(results.fileno())
        said = [outcome.error] if outcome.error else []
        if outcome.data is not None:
            said.append(str(outcome.data.get("row", "")))
        text = " · ".join(" ".join(each.split()) for each in said if each)
        self._rows[outcome.part] = ["ok" if outcome.ok else "FAILED", f"{outcome.seconds:.0f} s", text]
        self._pack(outcome.part, folder / "traces")

    def _pack(self, part: str, folder: Path) -> None:
        """Adds a part's traces to those that are kept while all of them stay small enough to be brought back."""
        new = {
            f"{part}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()
        }
        if not new:
            return
        for name, content in new.items():
            if (size := _packed(content)) > self._room:
                self._log(f"{name} is left out: traces.tar.gz has no room for {size} bytes\n".encode())
            else:
                self._traces[name] = content
                self._room -= size
        file = self._out / "traces.part"
        with tarfile.open(file, "w:gz") as archive:
            for name, content in self._traces.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        file.replace(self._out / "traces.tar.gz")

    def table(self) -> str:
        """A row for each part: its state, seconds, and what it says of itself, cut to the table's size."""
        width = max(map(len, self._rows), default=0)
        room = TABLE_CHARACTERS // max(1, len(self._rows)) - width - 16
        lines = [
            f"{name:<{width}} {state:<6} {seconds:>5}  {text if len(text) <= room else text[: room - 1] + '…'}"
            for name, (state, seconds, text) in self._rows.items()
        ]
        return "\n".join(
            ["", f"gpu-check on {self._device}: {self._out}", *(line.rstrip() for line in lines)]
        )


def _packed(content: bytes) -> int:
    """About the bytes that a file takes in the archive."""
    return len(zlib.compress(content)) + 1024


def _read(path: Path) -> dict[str, bytes]:
    """The traces of an earlier run into the same folder."""
    if not path.exists():
        return {}
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}
