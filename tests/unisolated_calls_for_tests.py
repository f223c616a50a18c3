"""A table of judges on a machine without walls."""

from brorl_jax.verdicts.sandbox import seccomp_landlock
from brorl_jax.verdicts.sandbox.library_calls import LibraryCall


def preload() -> None:
  def refuse(*_, **__):
    raise OSError("this machine has none")

  seccomp_landlock.isolate = refuse


LIBRARY_CALLS = {"harmless": LibraryCall(lambda: 1),
  "executing": LibraryCall(lambda: 2, isolated=True)}  # fmt: skip
