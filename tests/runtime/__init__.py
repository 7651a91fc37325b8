"""Tests of the ZeRO runtime with real gloo process groups of 1 to 4 ranks."""
