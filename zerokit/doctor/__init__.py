"""`zerokit doctor`: finds what would make training fail, hang or crawl on a machine or cluster.

A subject a module (software, devices, interfaces, …): its facts as a dataclass, a function that looks, and one that
judges facts without looking. `worker` looks and measures on every rank, `examine` starts the ranks and joins all.
"""
