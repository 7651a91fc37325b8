"""`zerokit bench` between two hosts of this machine, network namespaces that are joined by a slow link.

The link is made by `tc tbf`, which shapes what leaves each host. A rank takes one core. Options of `zerokit bench`
follow those of the link, and `zerokit compare` shows the records. Needs root, iproute2 and openssh.

python benchmarks/slow_link.py --gbits 1 -- --engine zerokit,ddp,fsdp2 --stage 0,2,3 --wire own,bf16 --output wire
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import ROOT, make_parser
from tests.support.namespaces import Hosts, hosts_refusal, two_hosts


def limit(hosts: Hosts, gbits: float) -> None:
    """Let what leaves each host wait for a link of `gbits`."""
    for host in hosts.addresses:
        # A burst of a few kB is used up between two ticks of the kernel's timer, and the link then carries less.
        words = f"tc qdisc add dev eth0 root tbf rate {gbits:g}gbit burst 128kb latency 20ms".split()
        subprocess.run([*hosts.inside(host), *words], check=True)


def on_both(hosts: Hosts, script: str, words: Sequence[object]) -> list[Any]:
    """What `script --rank R WORDS` has printed last on each host, as JSON: a rank of one thread a host."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*hosts.inside(host), sys.executable, script, "--rank", str(rank), *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank, host in enumerate(hosts.addresses)
    ]
    results = []
    for process in ranks:
        said, _ = process.communicate(timeout=3600)
        if process.returncode:
            raise SystemExit(f"{script} {' '.join(map(str, words))}: a rank ended with {process.returncode}")
        results.append(json.loads(said.splitlines()[-1]))
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench; its exit code, or 4 where there can be no hosts."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--gbits", type=float, default=1.0, help="of the link, each way; sockets carry about 0.93 of it"
    )
    parser.add_argument("bench", nargs="*", help="options of zerokit bench, after --")
    arguments = parser.parse_args(words)
    if (why := hosts_refusal()) is not None:
        print(f"slow_link: {why}", file=sys.stderr)
        return 4
    with two_hosts() as hosts:
        limit(hosts, arguments.gbits)
        command = [
            *(*hosts.inside("a"), sys.executable, "-m", "zerokit.cli", "bench", "--launcher", "ssh"),
            *("--hosts", "a,b", "--ssh-option", f"-F {hosts.config}", "--no-mlflow", *arguments.bench),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
