"""The paper as functions: jax.numpy only, no I/O, no state."""
