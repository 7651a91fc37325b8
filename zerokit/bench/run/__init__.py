"""One bench from start to end, as its launcher sees it."""
