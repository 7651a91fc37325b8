"""Speed and memory: `bench_*.py` time the small pieces, `compare_engines.py` whole training steps."""
