"""`python -m zerokit.bench.record`: print the JSON Schema of a record."""

import json

from pydantic import TypeAdapter

from zerokit.bench.record.record import Record

print(json.dumps(TypeAdapter(Record).json_schema(), indent=2, ensure_ascii=False))
