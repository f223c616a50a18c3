"""Checks every shape annotation of the package while the tests run."""

import os
import pathlib
import signal

import compiling

# A shell that starts us in the background ignores SIGINT for us and for what we
# start. A handler is not inherited: children get the default again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  f"--xla_force_host_platform_device_count=8 {compiling.QUICK}"
)
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Compiled programs are kept for the next run of the tests, also those of the
# commands that tests start.
programs = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
# verdicts/, data/ and config/ hold no arrays, and say themselves what is wrong
# with their arguments.
package = pathlib.Path(__file__).parents[1] / "brorl_jax"
names = [
  ".".join(("brorl_jax", *path.relative_to(package).with_suffix("").parts))
  for path in sorted(package.rglob("[!_]*.py"))
  if not {"verdicts", "data", "config", "configs"}
  & {*path.relative_to(package).parts}
]
jaxtyping.install_import_hook(names, "beartype.beartype")

from brorl_jax import main

main.keep_programs(None)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
  """Compiled programs keep memory maps; a process that has 65,530 crashes."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_text().count("\n") > 25_000:
    jax.clear_caches()


@pytest.fixture
def unhooked():
  """As for a user, whose annotations are not checked."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
