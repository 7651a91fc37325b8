"""The pictures of docs/slow-links.md: what pays, computed, and what islands.py and losses.py have measured.

python benchmarks/island_pictures.py islands.json losses.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import altair as alt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import read_options
from zerokit.sizes import BLOCK_FORMATS

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_FLYING = "H = 50, 3 fragments in flight"
_PARAMETERS = 1e9
"""Parameters of the model in the computed picture."""
_AVERAGED = 50
"""Steps of which a point of a curve is the mean."""


def link(content: dict[str, Any]) -> Any:
    """What leaves one host, by time."""
    rates = content["runs"][_FLYING][0][0]["rates"]
    points = [{"s": index / 10, "mbits": rate * 8 / 1e6} for index, rate in enumerate(rates)]
    return (
        alt.Chart(alt.InlineData(values=points), width=640, height=180)
        .mark_area(interpolate="step-after", color="#0067b1", opacity=0.7)
        .encode(
            x=alt.X("s:Q", title="seconds", scale=alt.Scale(nice=False)),
            y=alt.Y("mbits:Q", title="Mbit/s leaving a host", scale=alt.Scale(domain=[0, 10])),
        )
    )


def curves(content: dict[str, Any]) -> Any:
    """The training losses of each method, the mean over seeds and neighbouring steps."""
    points = []
    methods: dict[str, list[list[float]]] = {}
    for job, result in content["jobs"].items():
        methods.setdefault(job.partition(", ")[2], []).append(result["losses"])
    for name, runs in methods.items():
        by_step = [mean(values) for values in zip(*runs, strict=True)]
        for stop in range(_AVERAGED, len(by_step) + 1, _AVERAGED):
            points.append({"step": stop, "loss": mean(by_step[stop - _AVERAGED : stop]), "name": name})
    return _lines(
        points, alt.X("step:Q", title="step"), alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False))
    )


def pays() -> Any:
    """Throughput by the speed of the link, beside training without communication: a step of a second in bf16.

    Gradients overlap with the backward pass, two thirds of the step, and parameters with the forward pass. Without
    fragments in flight a round waits for its synchronisation.
    """
    ways = {
        "bf16 both ways": (2.0, 2.0),
        "int8 gradients": (BLOCK_FORMATS["int8"].nbytes(2**20) / 2**20, 2.0),
        "int4 gradients": (BLOCK_FORMATS["int4"].nbytes(2**20) / 2**20, 2.0),
    }
    points: list[dict[str, Any]] = []
    for number in range(81):
        gbits = 10 ** (-2 + number / 20)
        seconds = 8 * _PARAMETERS / 2 / (gbits * 1e9)  # of a byte for each element that a rank sends
        steps = {
            name: max(2 / 3, gradients * seconds) + max(1 / 3, parameters * seconds)
            for name, (gradients, parameters) in ways.items()
        }
        steps |= {f"local steps, H = {every}": 1 + 2 * 4 * seconds / every for every in (50, 500)}
        steps["H = 50, fragments in flight"] = max(1.0, 2 * 4 * seconds / 50)
        points += [{"gbits": gbits, "share": 100 / step, "name": name} for name, step in steps.items()]
    return _lines(
        points,
        alt.X("gbits:Q", title="Gbit/s between two islands", scale=alt.Scale(type="log")),
        alt.Y("share:Q", title="% of the throughput without communication"),
    )


def _lines(points: list[dict[str, Any]], x: alt.X, y: alt.Y) -> Any:
    """A line for each name, in their order."""
    names = list(dict.fromkeys(point["name"] for point in points))
    chart = alt.Chart(alt.InlineData(values=points), width=560, height=260)
    # On top, with room: a browser's font may be wider than the one that the picture was laid out with.
    legend = alt.Legend(title=None, orient="top", columns=3, columnPadding=60, labelLimit=0)
    return chart.mark_line().encode(x=x, y=y, color=alt.Color("name:N", sort=names, legend=legend))


def main() -> None:
    """Draw what is computed, and from two files what was measured."""
    files = read_options(__doc__, None, _measured=[]).measured
    if len(files) not in (0, 2):
        sys.exit("give the file of islands.py and that of losses.py, or none")
    PICTURES.mkdir(exist_ok=True)
    measured = [json.loads(Path(path).read_text()) for path in files]
    charts = {"when-it-pays.svg": pays()}
    if measured:
        charts |= {"link.svg": link(measured[0]), "local-steps-loss.svg": curves(measured[1])}
    for name, chart in charts.items():
        chart.properties(background="white").save(str(PICTURES / name))


if __name__ == "__main__":
    main()
