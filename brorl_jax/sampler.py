"""Old name of `brorl_jax.rollout.sampler`, kept for one release."""

from brorl_jax.rollout.sampler import sample

__all__ = ["sample"]
