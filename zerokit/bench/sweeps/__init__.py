"""Many cells, one after the other."""
