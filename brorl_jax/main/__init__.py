"""Flags -> config -> wiring, in the order of the README's figure."""
