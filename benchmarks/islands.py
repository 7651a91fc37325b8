"""Two islands joined by a slow link: network namespaces of this machine with a link of 10 Mbit/s between them.

Each case trains gpt-5m on one rank a host, in fresh processes. With `--pause-ms` it trains six linear layers of 1 M
parameters together, and each step sleeps so long: a device's work, which a busy processor does not slow down. The pace
is that of the steps after the first round, beside islands that train alone. What leaves a host is read off its
interface every 10 ms; the peak is that of 100 ms. Needs root and iproute2.

python benchmarks/islands.py
python benchmarks/islands.py --pause-ms 100
python benchmarks/islands.py --rounds 3 --json islands.json
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, machine, make_parser, plain_table, write_json
from benchmarks.slow_link import limit, on_both
from tests.support.namespaces import refusal, two_hosts

FLYING = "H = 50, 3 fragments in flight"
CASES: dict[str, dict[str, Any] | None] = {
    "alone": {"every": 10**6},
    "H = 50": {"every": 50},
    FLYING: {"every": 50, "fragments": 3, "delay": 17, "blend": 0.5},
    "every step": None,
}
THROUGHPUT, PEAK = 0.95, 1.3
ADDRESS, PORT = "10.77.0.1", 29511
_SAMPLE_S, _WINDOW = 0.01, 10


class Link:
    """Bytes that have left this host, every 10 ms."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.samples.append((time.monotonic(), int(self._counter.read_text())))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def rates(self, start: float, stop: float) -> list[float]:
        """Bytes a second in each 100 ms between two moments."""
        inside = [sample for sample in self.samples if start <= sample[0] <= stop]
        pairs = zip(inside, inside[_WINDOW:], strict=False)
        return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in list(pairs)[::_WINDOW]]


def rank_main(rank: int, case: str, steps: int, batch: int, pause_ms: int) -> None:
    """One island's part; prints its figures."""
    import torch
    import torch.distributed as dist

    from zerokit import LocalSteps, ZeroOptimizer
    from zerokit.bench.workloads.build import build

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS}:{PORT}", rank=rank, world_size=2)
    options = CASES[case]
    islands: dict[str, Any] = {} if options is None else {"mesh": (2, 1), "stage": ("local", 2)}
    model: Any = (
        torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(6))) if pause_ms else build("gpt-5m")
    )
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, precision="fp32", lr=1e-3, bucket_mb=1.0, **islands)
    if options is not None:
        local = LocalSteps(optimizer, **options)
    generator = torch.Generator().manual_seed(rank)
    link, times = Link(), [time.monotonic()]
    for _ in range(steps):
        if pause_ms:
            time.sleep(pause_ms / 1000)
            optimizer.backward(model(torch.randn(batch, 400, generator=generator)).square().mean())
        else:
            tokens = torch.randint(0, 256, (batch, 129), generator=generator)
            optimizer.backward(model(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic())
    link.stop()
    skipped = 50 if steps > 100 else 2
    seconds = times[-1] - times[skipped]
    rates = link.rates(times[skipped], times[-1])
    result = {
        "step_ms": 1000 * seconds / (steps - skipped),
        "peak": max(rates, default=0.0),
        "mean": mean(rates) if rates else 0.0,
        "rates": [round(rate) for rate in rates],
        "times": [round(moment - times[0], 4) for moment in times],
        "waited_s": local.waited_s if options is not None else None,
    }
    dist.barrier()
    print(json.dumps(result), flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens")
    parser.add_argument("--pause-ms", type=int, default=0, help="a step's sleep, in place of gpt-5m")
    parser.add_argument("--mbits", type=float, default=10.0)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := refusal():
        raise SystemExit(f"no two hosts here: {reason}")
    with two_hosts(servers=False) as hosts:
        limit(hosts, options.mbits / 1000)

        def keep(results: dict[str, list[Any]]) -> None:
            content = {"options": vars(options) | {"json": None}, "machine": machine(), "runs": results}
            write_json(options.json, content)

        def measure(case: str) -> list[dict[str, Any]]:
            """The figures of both islands."""
            steps = max(4, options.steps // 50) if CASES[case] is None else options.steps
            return on_both(hosts, __file__, [case, steps, options.batch, options.pause_ms])

        runs = in_rounds(options.cases, options.rounds, measure, keep)
    steps_ms = {
        name: median(max(r["step_ms"] for r in one) for one in several) for name, several in runs.items()
    }
    peaks = {
        name: median(one[0]["peak"] / max(one[0]["mean"], 1.0) for one in several)
        for name, several in runs.items()
    }
    slower = {name: step_ms / steps_ms.get("alone", step_ms) for name, step_ms in steps_ms.items()}
    rows = [[name, f"{steps_ms[name]:.0f}", f"{1 / slower[name]:.3f}", f"{peaks[name]:.2f}"] for name in runs]
    what = (
        f"1 M parameters, {options.pause_ms} ms" if options.pause_ms else f"gpt-5m, batch {options.batch}x128"
    )
    title = f"{what}, two islands of one rank, {options.mbits:g} Mbit/s"
    print(plain_table(title, ["case", "step, ms", "÷ alone, throughput", "peak ÷ mean of the link"], rows))
    if FLYING not in runs or "alone" not in runs:
        return 0
    slow = bar_holds("step in flight ÷ alone", slower[FLYING], 1 / THROUGHPUT)
    even = bar_holds("peak of the link", peaks[FLYING], PEAK)
    return 0 if slow and even else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        number, name, count, sequences, pause = sys.argv[2:]
        rank_main(int(number), name, int(count), int(sequences), int(pause))
        sys.exit(0)
    sys.exit(main())
