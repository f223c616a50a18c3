"""Checks every shape annotation of the package while the tests run."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
# Machine code is made without LLVM's optimizations: making it is 70 % of what
# tests take, and a third less without. XLA's own passes stay, and the runs of
# end_to_end_test are compiled as always.
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
# tasks/ holds no arrays, and says itself what is wrong with its arguments.
package = pathlib.Path(__file__).parents[1] / "brorl_jax"
names = {path.stem for path in package.glob("[!_]*")} - {"tasks", "assets"}
jaxtyping.install_import_hook(
  sorted(f"brorl_jax.{name}" for name in names), "beartype.beartype"
)

from brorl_jax.main import programs

# Where commands keep them too, those that tests start among them.
programs.keep(None)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
  """Compiled programs keep memory maps; a process that has 65,530 crashes."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_text().count("\n") > 25_000:
    jax.clear_caches()
