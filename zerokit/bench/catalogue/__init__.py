"""Which engines and models there are, and what they can do; torch is not imported."""
