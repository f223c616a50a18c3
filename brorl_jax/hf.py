"""Old name of `brorl_jax.model.huggingface`, kept for one release."""

from brorl_jax.model.huggingface import load, save

__all__ = ["load", "save"]
