r"""Launchers: they start ranks in torchrun's environment and ensure that all of them end.

    local          N simulated nodes on this machine, an `agent` (torchrun itself) each
    ssh, slurm     a `node` on each machine, reached by a command (`ssh`, `srun`), which runs an agent; `remote` sends
                   them `frames`, and `slurm` also writes the batch script of a job that does
    kubernetes     objects for pods that are nodes by themselves
    joined         ranks or nodes that another launcher has started (see `membership`): the first leads, others follow

Each has the same call: `launch(module, arguments, nodes=, nproc_per_node=, log_dir=, poll=)`. Every rank is a `rank`
process around the module; `agents` waits for them, `failures` explains why one failed; `processes` kills what must not
be left behind; `interrupts` takes signals; `hosts` and `network` know names and addresses.
"""
