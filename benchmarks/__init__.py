"""Speed and memory beside `zerokit bench`: test_* are micro-benchmarks for pytest,
and each script answers one question about whole trainings or commands that a bench does not."""
