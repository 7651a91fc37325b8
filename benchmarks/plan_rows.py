"""Planned beside published throughput, row by row: `python -m benchmarks.plan_rows`.

The rows and their sources are in `plan_rows.json`. `--calibrate` fits what devices reach of their peaks to the rows of
one node (8 GPUs) alone and prints the table for `zerokit/planning/efficiency.py`; all other rows only check it. There
is no constant of a row or a table beside what the source says of it: model, batch, devices, network, wire.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from math import log
from pathlib import Path
from statistics import median

from benchmarks.measuring import plain_table, read_options
from zerokit.bench.catalogue.workloads import GPTConfig, LlamaConfig
from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.placement import Mesh, Placement
from zerokit.planning.efficiency import SHARES, Shares, with_shares
from zerokit.planning.hardware import DEVICES, Cluster, network
from zerokit.planning.timeline import Plan, StepTime, step_time
from zerokit.planning.work import ModelWork, Product, UnitWork, Work
from zerokit.sizes import ElementBytes

ROWS = Path(__file__).with_suffix(".json")
NODE = 8
"""GPUs of a node, unless a table says otherwise."""


Shape = GPTConfig | LlamaConfig
"""A decoder; the length of its sequences is the row's."""


def _mpt(width: int, layers: int, heads: int) -> Shape:
    return GPTConfig(50368, 2048, width, layers, heads)


def _llama(width: int, layers: int, heads: int, hidden: int, vocabulary: int, key_heads: int) -> Shape:
    return LlamaConfig(vocabulary, 8192, width, layers, heads, key_heads, hidden, tied=False)


SHAPES = {
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    "llama-2-7b": _llama(4096, 32, 32, 11008, 32000, 32),
    "llama-2-13b": _llama(5120, 40, 40, 13824, 32000, 40),
    "llama-2-34b": _llama(8192, 48, 64, 22016, 32000, 8),
    "llama-2-70b": _llama(8192, 80, 64, 28672, 32000, 8),
    "llama-3-8b": _llama(4096, 32, 32, 14336, 128256, 8),
    "llama-3-15b": _llama(5120, 40, 40, 17920, 128256, 8),
    "llama-3-70b": _llama(8192, 80, 64, 28672, 128256, 8),
}


@dataclass(frozen=True)
class PublishedMemory:
    """What a GPU held at the peak of a step, and how the row's source trains.

    Attributes:
        gib: allocated memory; where `reserved`, with what torch's allocator had reserved beside it.
        recompute: "all" blocks, or all "operations" but attention and every second product.
        loss: in "fp32", or of the logits in their dtype, which stay in memory until the next step.
        held_bytes: of an element of the shards at that moment: parameters, gradients and optimizer states.
    """

    gib: float
    recompute: str
    loss: str
    held_bytes: int
    reserved: bool = False


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    table: str
    device: str
    network_gbit_per_s: float
    strategy: str
    reduce_bytes: int
    model: str
    seq_len: int
    gpus: int
    micro_batch: int
    accumulate: int
    recompute: str | int
    tokens_per_s_per_gpu: float
    outlier: str | None = None
    """Why no plan can meet it."""
    network_published: bool = True
    """Whether the source says the network's speed; else it is that of most nodes of such devices."""
    node: int = NODE
    master_bytes: int = 4
    state_bytes: int = 8
    compiled: bool = False
    """Whether the model was compiled, so that elementwise operations are fused."""
    memory: PublishedMemory | None = None

    @property
    def one_node(self) -> bool:
        return self.gpus <= self.node

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one GPU in a step."""
        return self.seq_len * self.micro_batch * self.accumulate


def read_rows(path: Path = ROWS) -> list[Row]:
    """All published rows."""
    rows = []
    for table in json.loads(path.read_text()):
        names = {field.name for field in fields(Row)} - {"memory"}
        shared = {key: value for key, value in table.items() if key in names}
        reasons, memory = table.get("outliers", {}), table.get("memory", {})
        for values in table["rows"]:
            row = Row(table["name"], **shared, **dict(zip(table["columns"], values, strict=True)))
            key = f"{row.model} {row.seq_len} {row.gpus} {row.micro_batch}"
            gib = memory.get("gib", {}).get(key)
            held = None if gib is None else PublishedMemory(**memory | {"gib": gib})
            rows.append(replace(row, outlier=reasons.get(key), memory=held))
    return rows


# ---- a model's work, by arithmetic


def _inside(shape: Shape) -> tuple[int, int]:
    """The widths of all keys together, and of the feed-forward."""
    if isinstance(shape, GPTConfig):
        return shape.width, 4 * shape.width
    return shape.width * shape.key_value_heads // shape.heads, shape.hidden


def _products(tokens: int, inputs: int, outputs: int) -> tuple[Product, Product, Product]:
    """A linear layer: forward, and the gradients of its inputs and of its weights."""
    return (
        Product(tokens, outputs, inputs),
        Product(tokens, inputs, outputs),
        Product(inputs, outputs, tokens),
    )


@cache
def model_work(
    shape: Shape, seq_len: int, samples: int, recompute: str | int, *, compiled: bool = False
) -> ModelWork:
    """One micro-batch in bf16: causal attention in a fused kernel, all else one operation after another.

    In a `compiled` one, norms, residual sums, rotary positions and activations read and write once what products and
    attention give and take.
    """
    tokens, width, llama = seq_len * samples, shape.width, isinstance(shape, LlamaConfig)
    keys, hidden = _inside(shape)
    matrices = [(width, width + 2 * keys), (width, width)]
    matrices += [(width, hidden)] * (2 if llama else 1) + [(hidden, width)]
    linear = [_products(tokens, *matrix) for matrix in matrices]
    size = width // shape.heads
    scores = Product(seq_len, seq_len // 2, size, samples * shape.heads)
    values = Product(seq_len, size, seq_len // 2, samples * shape.heads)
    # Bytes a token that other operations move, as `zerokit.planning.trace` counts them for these shapes: norms,
    # residual sums, rotary positions in fp32, activations. Norms are fused, as in the sources.
    by_width, by_hidden = ((92, 198), (10, 18)) if llama else ((20, 66), (4, 6))
    if compiled:
        by_width, by_hidden = (22, 44), (6, 12)
    forward_moved, backward_moved = (
        tokens * (by_width[way] * width + by_hidden[way] * hidden) for way in range(2)
    )
    kernels = 45 if llama else 12
    forward = Work((*(each[0] for each in linear), scores, values), forward_moved, kernels)
    backward = Work(
        (*(product for each in linear for product in each[1:]), scores, scores, scores, values, values),
        backward_moved,
        2 * kernels,
    )
    # Recomputation ends with the last value that backward needs: the input of the last product.
    again = Work((*(each[0] for each in linear[:-1]), scores, values), forward_moved, kernels)
    every = {"none": 0.0, "all": 1.0, "every second": 0.5}
    repeated = round(every[recompute] * shape.layers) if isinstance(recompute, str) else recompute
    blocks = []
    for layer in range(shape.layers):
        turns = (layer + 1) * repeated // shape.layers - layer * repeated // shape.layers
        blocks.append(UnitWork(1 + layer, forward, backward, again if turns else Work()))
    embedding = Work((), 4 * tokens * width, 4)
    unembedding = _products(tokens, width, shape.vocabulary)
    logits = tokens * shape.vocabulary
    loss = (18, 26) if llama else (2, 4)  # PyTorch's, in fp32; MPT's is fused
    head = UnitWork(
        shape.layers + 1,
        Work(unembedding[:1], loss[0] * logits, 8),
        Work(unembedding[1:], loss[1] * logits, 16),
    )
    first = UnitWork(0, embedding, Work((), 8 * shape.vocabulary * width, 3))
    return ModelWork((first, *blocks, head), tokens)


@cache
def _layout(shape: Shape, seq_len: int, world: int) -> Layout:
    llama, (keys, hidden) = isinstance(shape, LlamaConfig), _inside(shape)
    block = shape.width * (2 * shape.width + 2 * keys + (3 if llama else 2) * hidden + 2)
    table = shape.vocabulary * shape.width
    names = ("embedding", *(f"blocks.{at}" for at in range(shape.layers)), "head")
    sizes = [
        table + (0 if llama else seq_len * shape.width),
        *[block] * shape.layers,
        table + shape.width if llama else shape.width,
    ]
    segments = [
        Segment(name if name.startswith("blocks") else None, (Parameter(f"{name}.weight", (size,)),))
        for name, size in zip(names, sizes, strict=True)
    ]
    return build_layout(segments, world=world, bucket_bytes=2**20)


# ---- a row's plan


def plan_row(row: Row, shares: Shares) -> StepTime:
    """The step that the row's source describes: FSDP's strategies are stage 3, kept or over the ranks of a node."""
    shape = SHAPES[row.model]
    layout = _layout(shape, row.seq_len, row.gpus)
    hybrid = row.strategy == "hybrid"
    mesh = Mesh(row.gpus // row.node, row.node) if hybrid else Mesh(1, row.gpus)
    plan = Plan(
        model_work(shape, row.seq_len, row.micro_batch, row.recompute, compiled=row.compiled),
        layout,
        Placement.of((0, 3) if hybrid else 3, mesh),
        ElementBytes(2, row.reduce_bytes, row.master_bytes, row.state_bytes),
        micro_batches=row.accumulate,
        reductions=row.accumulate,  # FSDP reduces after every backward pass
        kept=frozenset(range(len(layout.units))) if row.strategy == "grad_op" else None,
    )
    device = DEVICES[row.device]
    cluster = Cluster(device, row.node, device.inner, network(row.network_gbit_per_s))
    return step_time(plan, cluster, with_shares(device, shares, "bf16"))


def throughput(row: Row, shares: Shares) -> float:
    """Planned tokens a second and GPU."""
    return row.tokens_per_step / plan_row(row, shares).total_s


MATTERS = 0.05
"""A network matters where twice or half its speed moves a step by more."""


def purpose(row: Row, shares: Shares) -> str:
    """What the row is for. One whose network matters and is not published checks nothing."""
    if row.one_node:
        return "one node (calibrated)"
    if not row.network_published:
        speeds = (row.network_gbit_per_s / 2, row.network_gbit_per_s * 2)
        slow, fast = (throughput(replace(row, network_gbit_per_s=speed), shares) for speed in speeds)
        if fast / slow - 1 > MATTERS:
            return "beyond one node, depends on a network that is not published"
    return "beyond one node, outliers (named)" if row.outlier else CHECKED


CHECKED = "beyond one node (checked)"


def calibrate(rows: Sequence[Row], start: Shares) -> Shares:
    """The shares with the least sum of absolute logarithmic errors on these rows, by coordinate search."""

    def loss(shares: Shares) -> float:
        return sum(abs(log(throughput(row, shares) / row.tokens_per_s_per_gpu)) for row in rows)

    names = [field.name for field in fields(Shares)]
    if len(rows) <= len(names):  # few rows leave memory and communication as they are
        names = names[: 3 if len(rows) > 3 else 1]
    best, least, step = start, loss(start), 0.08
    while step > 0.009:
        better = False
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(best, **{name: min(getattr(best, name) * factor, 1.0)})
                if (found := loss(tried)) < least:
                    best, least, better = tried, found, True
        if not better:
            step /= 2
    return Shares(*(round(value, 3) for value in astuple(best)))


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(
        __doc__, arguments, calibrate=(False, "fit the table of efficiencies to rows of one node")
    )
    rows = read_rows()
    shares = dict(SHARES)
    if options.calibrate:
        for device in {row.device for row in rows if row.one_node}:
            own = [row for row in rows if row.one_node and row.device == device]
            shares[device] = calibrate(own, shares.get(device, SHARES["h100-80"]))
            print(f'    "{device}": {shares[device]},')
    lines: list[list[str]] = []
    found: dict[str, list[float]] = {}
    for row in rows:
        step = plan_row(row, shares[row.device])
        planned = row.tokens_per_step / step.total_s
        error = planned / row.tokens_per_s_per_gpu - 1
        found.setdefault(purpose(row, shares[row.device]), []).append(abs(error))
        speeds = f"{row.tokens_per_s_per_gpu:.0f} {planned:.0f} {error:+.1%} {step.exposed_total_s / step.total_s:.1%}"
        table = f"{row.table}{f' (outlier: {row.outlier})' if row.outlier else ''}"
        lines.append([row.model, str(row.seq_len), str(row.gpus), *speeds.split(), table])
    columns = ["model", "seq", "GPUs", "published", "planned", "error", "exposed", "table"]
    print(plain_table("Tokens a second and GPU", columns, lines))
    for name, errors in sorted(found.items()):
        within = sum(error <= 0.15 for error in errors)
        print(
            f"{name}: {len(errors)} rows, median error {median(errors):.1%}, worst {max(errors):.1%}, "
            f"{within} within 15 %"
        )


if __name__ == "__main__":
    main()
