"""This machine: its devices, processors and memory, and which of them a rank uses."""
