"""Ways to train that people use, each beside plain torch at every stage.

`engines` is the interface that a pattern is written against, with plain torch and zerokit behind it; `harness`
declares a pattern and what is expected at each stage; `models` are shared. Modules named after a subject hold the
patterns, `catalogue` collects them and writes zerokit/runtime/PATTERNS.md, and `running` runs them.
"""
