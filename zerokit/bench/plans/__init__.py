"""Plans for the bench's workloads: models by name, and planned figures for recorded cells."""
