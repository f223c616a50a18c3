"""Puzzles, verifiers and data sets. Never imports jax."""
