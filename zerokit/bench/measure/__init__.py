"""What is measured, where, and what the numbers say."""
