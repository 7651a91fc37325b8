"""Pages and pictures about benches, from their records: what they show, what they say, and how they are drawn."""
