"""Speed and memory beside `zerokit bench`: `bench_*.py` time the small pieces, the scripts one question each."""
