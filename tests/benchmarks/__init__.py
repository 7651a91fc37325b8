"""Tests of what measures: benchmarks/ and scripts/."""
