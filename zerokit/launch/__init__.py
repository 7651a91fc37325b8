"""Launches: ranks are started in torchrun's environment, waited for, and all of them end.

    launch(module, arguments, nodes=, nproc_per_node=, log_dir=, poll=)

is the call of every launcher: `local` simulates nodes on this machine, those of `zerokit.cluster` have others. `ranks`
are the processes on one machine, each a `rank` around the module, and an `Agent` that is waited for; `failures`
explains why one failed; `processes` kills what must not be left behind; `limits` holds ranks to cores and memory;
`logs` shows what they print.
"""
