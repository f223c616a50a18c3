"""Breaks short runs in many ways and compares how they end; see soak.sh."""
