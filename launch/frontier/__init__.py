"""The revival experiment; see README.md."""
