"""Scripts that start, measure and compare; run from the repository's root."""
