"""Benchmarks of this project and of its peers; see LOG.md."""
