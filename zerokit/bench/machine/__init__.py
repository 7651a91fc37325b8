"""This machine: its devices, processors and memory, which of them a rank uses, and how fast they and the wires are."""
