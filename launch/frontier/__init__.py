"""The frontier: which N for which budget; see README.md."""
