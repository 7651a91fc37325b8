"""A bench as plain data: its settings, its measurements, and the results computed from them.

Nothing here imports another room of the bench.
"""

from zerokit.bench.record.measured import (
    Bandwidth,
    Checkpoints,
    Data,
    DeviceMemory,
    Environment,
    MemoryTimeline,
    Model,
    Phases,
    Planned,
    Rank,
    Results,
    Samples,
    Save,
    Traffic,
    Twin,
    Utilisation,
)
from zerokit.bench.record.record import (
    FORMAT,
    Record,
    RecordError,
    read_record,
    record_schema,
    require_writable,
    write_record,
    write_text,
)
from zerokit.bench.record.results import count_distinct, summarise, with_twin
from zerokit.bench.record.status import Outcome, Status

__all__ = [
    "FORMAT",
    "Bandwidth",
    "Checkpoints",
    "Data",
    "DeviceMemory",
    "Environment",
    "MemoryTimeline",
    "Model",
    "Outcome",
    "Phases",
    "Planned",
    "Rank",
    "Record",
    "RecordError",
    "Results",
    "Samples",
    "Save",
    "Status",
    "Traffic",
    "Twin",
    "Utilisation",
    "count_distinct",
    "read_record",
    "record_schema",
    "require_writable",
    "summarise",
    "with_twin",
    "write_record",
    "write_text",
]
