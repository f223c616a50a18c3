"""Old name of `brorl_jax.tasks.data.dataset`, kept for one release."""

from brorl_jax.tasks.data.dataset import DataError, read

__all__ = ["DataError", "read"]
