"""Benchmarks of this project and of its peers; see NUMBERS.md."""
