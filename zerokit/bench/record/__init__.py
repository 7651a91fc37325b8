"""A bench as plain data: what it was asked (`settings`), what it measured, and what follows from that by arithmetic.

Nothing here imports another room of the bench.
"""

from zerokit.bench.record.measured import (
    Bandwidth,
    Checkpoints,
    Data,
    DeviceMemory,
    Environment,
    Model,
    Phases,
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
    STATUSES,
    Record,
    RecordError,
    read_record,
    record_schema,
    require_writable,
    write_record,
    write_text,
)
from zerokit.bench.record.results import count_distinct, summarise, with_twin

__all__ = [
    "FORMAT",
    "STATUSES",
    "Bandwidth",
    "Checkpoints",
    "Data",
    "DeviceMemory",
    "Environment",
    "Model",
    "Phases",
    "Rank",
    "Record",
    "RecordError",
    "Results",
    "Samples",
    "Save",
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
