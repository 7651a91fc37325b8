"""HTML pages and pictures of benches, and what GitHub shows of a comparison, made from their records."""
