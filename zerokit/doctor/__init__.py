"""`zerokit doctor`: what of a machine, or a cluster, would make training fail, hang or crawl.

A subject a module (software, devices, interfaces, …): its facts as a dataclass, a function that looks, and one that
judges facts without looking. `worker` looks and measures on every rank, `examine` starts the ranks and joins all.
"""
