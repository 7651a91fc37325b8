r"""Launches on several machines, over torch's store.

    ssh, slurm    a `member` on each machine, started by a command (`ssh`, `srun`): see `remote`
    joined        ranks that another launcher has started (see `membership`): the first leads, others are its members

The `leader` says what its members run, by `mail` in the store; each makes a copy of the launch's folder (see
`folders`). `hosts` reads lists of hosts.
"""
