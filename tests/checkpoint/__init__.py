"""Checkpoints: files, commands and the bits that training continues with."""
