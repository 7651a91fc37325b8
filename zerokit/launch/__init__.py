r"""Launchers: they start ranks in torchrun's environment and ensure that all of them end.

    local          N simulated nodes: all ranks are here
    ssh, slurm     a `node` on each machine, reached by a command (`ssh`, `srun`): see `remote`
    joined         ranks or nodes that another launcher has started (see `membership`): the first leads, others follow

Each has the same call: `launch(module, arguments, nodes=, nproc_per_node=, log_dir=, poll=)`. `ranks` are the processes
on one machine, each a `rank` around the module; `distant` are those on another, over the messages of `frames`. Both are
`agents`, which are waited for; `failures` explains why one failed; `processes` kills what must not be left behind;
`interrupts` takes signals; `hosts` and `network` know names and addresses.
"""
