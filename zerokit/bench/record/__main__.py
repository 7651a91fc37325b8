"""`python -m zerokit.bench.record`: print the JSON Schema of a record."""

from zerokit.bench.record.record import record_schema

print(record_schema(), end="")
