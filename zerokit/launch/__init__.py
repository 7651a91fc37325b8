"""Launchers: they start ranks that find the torchrun environment, and see to it that all of them end.

`local` starts N simulated nodes on this machine. Each node is an `agent` (torchrun itself), each rank a
`rank` process around the module to run. `processes` kills what must not be left behind.
"""
