"""HTML pages and pictures of benches, made from their records."""
