"""Checks every shape annotation of the package while the tests run."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import jax
import jaxtyping

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jaxtyping.install_import_hook("brorl_jax", "beartype.beartype")
