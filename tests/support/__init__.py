"""What the tests share: real ranks in processes, a zoo of models, training loops, and oracles."""
