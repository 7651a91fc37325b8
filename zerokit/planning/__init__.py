"""Plans of a training: memory and time of a step, computed before anything starts."""
