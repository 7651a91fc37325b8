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

import sys
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, plain_table, read_options, write_json
from benchmarks.ranks import run_ranks
from benchmarks.slow_link import limit
from tests.support.namespaces import refusal, wired_hosts

FLYING = "H = 50, 3 fragments in flight"
CASES: dict[str, dict[str, Any] | None] = {
    "alone": {"every": 10**6},
    "H = 50": {"every": 50},
    FLYING: {"every": 50, "fragments": 3, "delay": 17, "blend": 0.5},
    "every step": None,
}
THROUGHPUT, PEAK = 0.95, 1.3
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


def train(case: str, steps: int, batch: int, pause_ms: int) -> dict[str, Any]:
    """One island's figures."""
    import torch
    import torch.distributed as dist

    from zerokit import LocalSteps, ZeroOptimizer
    from zerokit.bench.workloads.build import build

    options = CASES[case]
    islands: dict[str, Any] = {} if options is None else {"mesh": (2, 1), "stage": ("local", 2)}
    model: Any = (
        torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(6))) if pause_ms else build("gpt-5m")
    )
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, precision="fp32", lr=1e-3, bucket_mb=1.0, **islands)
    if options is not None:
        local = LocalSteps(optimizer, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
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
    return {
        "step_ms": 1000 * seconds / (steps - skipped),
        "peak": max(rates, default=0.0),
        "mean": mean(rates) if rates else 0.0,
        "rates": [round(rate) for rate in rates],
        "times": [round(moment - times[0], 4) for moment in times],
        "waited_s": local.waited_s if options is not None else None,
    }


def main() -> int:
    options = read_options(
        __doc__,
        None,
        rounds=1,
        steps=200,
        batch=(8, "sequences of 128 tokens"),
        pause_ms=(0, "a step's sleep, in place of gpt-5m"),
        mbits=10.0,
        cases=list(CASES),
        json=Path,
    )
    if reason := refusal():
        raise SystemExit(f"no two hosts here: {reason}")
    with wired_hosts(servers=False) as hosts:
        limit(hosts, options.mbits / 1000)

        def keep(results: dict[str, list[Any]]) -> None:
            write_json(options.json, {"options": vars(options), "runs": results})

        def measure(case: str) -> list[dict[str, Any]]:
            """The figures of both islands."""
            steps = max(4, options.steps // 50) if CASES[case] is None else options.steps
            return run_ranks(train, case, steps, options.batch, options.pause_ms, hosts=hosts)

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
    sys.exit(main())
