"""Speed and memory beside `zerokit bench`: each script answers one question that a bench does not."""
