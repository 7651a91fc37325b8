"""`zerokit doctor`: finds what would make training fail, hang or crawl on a machine or cluster.

A subject a module (software, devices, interfaces, …): its facts as a dataclass, a function that looks, and those that
judge facts without looking. `checks` says which facts each check judges; `worker` looks on every rank and lets
`zerokit.bench.machine` measure, `examine` starts the ranks and joins all.
"""
