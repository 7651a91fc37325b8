"""Which engines and models there are, and what they can do. Standard library only."""
