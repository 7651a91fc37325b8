"""Engines over a slow wire: two network namespaces of this machine as hosts, joined by a link of 1 Gbit/s.

Each cell is `zerokit bench --launcher ssh` in fresh processes; rounds alternate their order. A rank takes one core. The
link is made by `tc tbf`, which shapes what leaves each host. Needs root, iproute2 and openssh.

python benchmarks/compare_wire.py
python benchmarks/compare_wire.py --rounds 3 --json compare_wire.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import ROOT, bar_holds, in_rounds, make_parser, plain_table, write_json
from tests.support.namespaces import Hosts, hosts_refusal, two_hosts
from zerokit.bench.record import Record, read_record
from zerokit.bench.record.metrics import METRICS, values_of
from zerokit.bench.record.schema import to_plain

WIRE_GBITS = 1.0
WITHIN = 0.05
"""How near the bus bandwidth must come to what plain sockets carry."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine and its options; `bar` is the most that its step may take of `base`'s."""

    name: str
    engine: str
    base: str | None = None
    bar: float | None = None


CELLS = (
    Cell("DDP", "ddp"),
    Cell("DDP, bf16 hook", "ddp --wire bf16", "DDP"),
    Cell("stage 2", "zerokit --stage 2", "DDP", 0.80),
    Cell("stage 2, bf16 wire", "zerokit --stage 2 --wire bf16", "DDP", 0.65),
    Cell("stage 2, bf16 and its wire", "zerokit --stage 2 --precision bf16 --wire bf16", "DDP", 0.50),
    Cell("FSDP2", "fsdp2 --stage 3", "DDP"),
    Cell("stage 3", "zerokit --stage 3", "FSDP2", 0.55),
    Cell("stage 3, bf16 wire", "zerokit --stage 3 --wire bf16", "FSDP2"),
)


def limit(hosts: Hosts, gbits: float) -> None:
    """Let what leaves each host wait for a link of `gbits`."""
    for host in hosts.addresses:
        # A burst of a few kB is used up between two ticks of the kernel's timer, and the link then carries less.
        words = f"tc qdisc add dev eth0 root tbf rate {gbits:g}gbit burst 128kb latency 20ms".split()
        subprocess.run([*hosts.inside(host), *words], check=True)


# Both ways at once, as collectives use it: what is left for payload after headers and acknowledgements.
_EXCHANGE = """
import socket, sys, threading, time
address, mebibytes = sys.argv[1], int(sys.argv[2])
if len(sys.argv) > 3:
    peer = socket.create_server((address, 7001)).accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection((address, 7001))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
outgoing, incoming = bytes(1 << 20), bytearray(1 << 20)
def send():
    for _ in range(mebibytes):
        peer.sendall(outgoing)
sender = threading.Thread(target=send)
begun = time.perf_counter()
sender.start()
left = mebibytes << 20
while left:
    left -= peer.recv_into(incoming)
sender.join()
print((mebibytes << 20) * 8 / (time.perf_counter() - begun) / 1e9)
"""


def carried_gbits(hosts: Hosts, mebibytes: int = 150) -> float:
    """What two plain sockets carry over the link, each way."""
    address = hosts.addresses["a"]
    processes = [
        subprocess.Popen(
            [*hosts.inside(host), sys.executable, "-c", _EXCHANGE, address, str(mebibytes), *more],
            stdout=subprocess.PIPE,
            text=True,
        )
        for host, more in (("a", ["serve"]), ("b", []))
    ]
    return min(float(process.communicate()[0]) for process in processes)


def run_cell(cell: Cell, hosts: Hosts, arguments: argparse.Namespace) -> Record:
    """The record of one bench between the hosts; raises `CalledProcessError` if it failed."""
    with tempfile.TemporaryDirectory(prefix="zerokit-wire-") as folder:
        path = Path(folder, "record.json")
        command = [
            *(*hosts.inside("a"), sys.executable, "-m", "zerokit.cli", "bench", "--launcher", "ssh"),
            *("--hosts", "a,b", "--ssh-option", f"-F {hosts.config}", "--model", arguments.model),
            *("--batch-size", "2", "--seq-len", "128", "--clip", "0", "--data", "synthetic", "--no-twin"),
            *("--no-mlflow", "--steps", str(arguments.steps), "--warmup", "2", "--output", str(path)),
            *("--engine", *cell.engine.split()),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return read_record(path)


def main(words: Sequence[str] | None = None) -> int:
    """Run all cells; returns 1 when a bar is missed, 4 where there can be no hosts."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="gpt-34m")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every record here")
    arguments = parser.parse_args(words)
    if (why := hosts_refusal()) is not None:
        print(f"compare_wire: {why}", file=sys.stderr)
        return 4
    cells = {cell.name: cell for cell in CELLS}
    with two_hosts() as hosts:
        limit(hosts, WIRE_GBITS)
        wire = max(carried_gbits(hosts) for _ in range(3))
        records = in_rounds(
            list(cells),
            arguments.rounds,
            lambda name: run_cell(cells[name], hosts, arguments),
            lambda results: write_json(arguments.json, to_plain(results)),
        )
    return show(records, wire)


def show(records: Mapping[str, Sequence[Record]], wire: float) -> int:
    """The table and the bars; `wire` is what the link carries, in Gbit/s. 1 when a bar is missed."""
    step_ms = {name: measured("step/p50_ms", *found) for name, found in records.items()}
    shares = {cell.name: step_ms[cell.name] / step_ms[cell.base] for cell in CELLS if cell.base is not None}
    rows = []
    for cell in CELLS:
        beside = f"{shares[cell.name]:.2f} of {cell.base}" if cell.name in shares else ""
        traffic = records[cell.name][0].traffic
        received = "" if traffic is None else f"{traffic.bytes / 1e6:.0f}"
        rows.append([cell.name, f"{step_ms[cell.name]:.0f}", beside, received])
    print(plain_table(f"Over {WIRE_GBITS:g} Gbit/s", ["engine", "step ms", "", "MB a step"], rows))
    held = [
        bar_holds(f"{cell.name} of {cell.base}", shares[cell.name], cell.bar)
        for cell in CELLS
        if cell.bar is not None
    ]
    stage_2 = records["stage 2"][0]
    for operation in sorted({one.operation for one in stage_2.bandwidth}):
        gbits = 8.0 * measured(f"bus/{operation}_gb_per_s", stage_2)
        carried = f"{operation}: {gbits:.3f} Gbit/s of bus bandwidth, {wire:.3f} through sockets; apart"
        held.append(bar_holds(carried, abs(gbits - wire) / wire, WITHIN))
    return 0 if all(held) else 1


def measured(name: str, *records: Record) -> float:
    """The median of one of the bench's figures."""
    return median(values_of(METRICS[name], records))


if __name__ == "__main__":
    sys.exit(main())
