"""What fifteen minutes on one GPU can show of zerokit, in parts that a host tries at small sizes."""
