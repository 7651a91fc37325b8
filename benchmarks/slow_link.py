"""`zerokit bench` between two hosts of this machine, network namespaces that are joined by a slow link.

The link is made by `tc tbf`, which shapes what leaves each host. A rank takes one core. Options of `zerokit bench`
follow those of the link, and `zerokit compare` shows the records. Needs root, iproute2 and openssh.

python benchmarks/slow_link.py --gbits 1 -- --engine zerokit,ddp,fsdp2 --stage 0,2,3 --wire own,bf16 --output wire
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import ROOT, read_options
from tests.support.namespaces import Hosts, hosts_refusal, wired_hosts

PORT = 29517


def limit(hosts: Hosts, gbits: float) -> None:
    """Let what leaves each host wait for a link of `gbits`."""
    for host in hosts.addresses:
        # A burst of a few kB is used up between two ticks of the kernel's timer, and the link then carries less.
        words = f"tc qdisc add dev eth0 root tbf rate {gbits:g}gbit burst 128kb latency 20ms".split()
        subprocess.run([*hosts.inside(host), *words], check=True)


def on_hosts(
    hosts: Hosts | None, module: str, *words: str, codes: Sequence[int] = (0,), folder: Path | None = None
) -> str:
    """What `python -m MODULE WORDS` prints on the first host, run on both as ranks of one thread, or here alone."""
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands: list[tuple[list[str], dict[str, str]]] = [([], {})]
    if hosts is not None:
        common |= {"MASTER_ADDR": hosts.addresses["a"], "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
        common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        commands = [
            (hosts.inside(host), {"RANK": str(rank), "GROUP_RANK": str(rank)})
            for rank, host in enumerate(hosts.addresses)
        ]
    processes = [
        subprocess.Popen(
            [*inside, sys.executable, "-m", module, *words],
            env=os.environ | common | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for inside, own in commands
    ]
    said = [process.communicate(timeout=3600) for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode not in codes:
            raise SystemExit(f"{module} {' '.join(words)} ended with {process.returncode}:\n{errors}")
    return said[0][0]


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench; its exit code, or 4 where there can be no hosts."""
    arguments = read_options(
        __doc__,
        words,
        gbits=(1.0, "of the link, each way; sockets carry about 0.93 of it"),
        _bench=([], "options of zerokit bench, after --"),
    )
    if (why := hosts_refusal()) is not None:
        print(f"slow_link: {why}", file=sys.stderr)
        return 4
    with wired_hosts() as hosts:
        limit(hosts, arguments.gbits)
        command = [
            *(*hosts.inside("a"), sys.executable, "-m", "zerokit", "bench", "--launcher", "ssh"),
            *("--hosts", "a,b", "--ssh-option", f"-F {hosts.config}", "--no-mlflow", *arguments.bench),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
