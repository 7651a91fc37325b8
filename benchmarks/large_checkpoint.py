"""What a checkpoint of many ranks costs beside its bytes: processor time and memory of the offline commands.

    python benchmarks/large_checkpoint.py
    python benchmarks/large_checkpoint.py --to 3000 --json results.json

The checkpoint has the shapes of 70 billion parameters on 1,024 ranks (`benchmarks/synthetic.py`): 250,000 slices, few
bytes. Each command is a process of its own. "Beside copying" is the time of the thread that plans, checks and combines:
others move bytes and sync files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import ROOT, plain_table, read_options, write_json
from benchmarks.synthetic import make_large_checkpoint

_MEASURED = """
import json, resource, time, zerokit
{call}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([time.process_time(), time.thread_time(), peak]))
"""


def main() -> int:
    """Measure each command once; returns the exit code."""
    options = read_options(
        __doc__,
        None,
        to=(512, "ranks that it is resharded to"),
        directory=(Path, "where to work  [default: a temporary one]"),
        json=(Path, "write settings, machine and every figure here"),
    )
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="zerokit-", dir=options.directory) as directory:
        step = Path(directory) / "step-00000001"
        make_large_checkpoint(step)
        manifest = (step / "manifest.json").stat().st_size
        for name, call in {
            "import": "import zerokit.checkpoint.formats.convert",
            "inspect": f"zerokit.inspect({str(step)!r})",
            "verify": f"assert zerokit.verify({str(step)!r}).intact",
            "reshard": f"zerokit.reshard({str(step)!r}, {options.to}, {directory + '/out'!r})",
            "diff": f"assert zerokit.diff({str(step)!r}, {directory + '/out'!r}).same",
        }.items():
            program = _MEASURED.replace("{call}", call)
            done = subprocess.run(
                [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
            )
            whole, beside, peak = json.loads(done.stdout)
            figures[name] = {"cpu_s": whole, "beside_copying_s": beside, "peak_bytes": peak}
    rows = []
    for name, one in figures.items():
        mib = (one["peak_bytes"] - manifest) / 2**20
        rows.append([name, f"{one['cpu_s']:.1f}", f"{one['beside_copying_s']:.1f}", f"{mib:.0f}"])
    columns = ["", "processor s", "beside copying", "peak MiB beyond the manifest"]
    print(plain_table(f"250,000 slices on 1,024 ranks, to {options.to}", columns, rows))
    record = {"format": "zerokit.large-checkpoint/1", "figures": figures, "to": options.to}
    write_json(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
