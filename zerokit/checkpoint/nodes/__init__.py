"""Checkpoints without a shared directory: each node holds the files of its ranks, and copies of other nodes'.

A step in a node's own directory has the files of an ordinary step, but not all ranks' files, and one more: `node.json`,
which says what each node holds. All nodes' directories together are the ordinary step. See FORMAT.md.
"""
