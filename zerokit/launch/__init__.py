r"""Launchers: they start ranks in torchrun's environment and ensure that all of them end.

    local          N simulated nodes: all ranks are here
    ssh, slurm     a member on each machine, started by a command (`ssh`, `srun`): see `remote`
    joined         ranks that another launcher has started (see `membership`): the first leads, others are its members

Each has the same call: `launch(module, arguments, nodes=, nproc_per_node=, log_dir=, poll=)`. `ranks` are the processes
on one machine, each a `rank` around the module; a `member` has those of another, as its `leader` says, by `mail` in
torch's store, and its `folders` are copies of the launch's. Both are `agents`, which are waited for; `failures`
explains why one failed; `processes` kills what must not be left behind; `interrupts` takes signals; `hosts` and
`network` know names and addresses.
"""
