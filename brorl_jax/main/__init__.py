"""Flags -> config -> wiring, in the order of the README's figure."""

import os
import runpy
import sys


def brorl() -> None:
  """The console script: `python -m brorl_jax.main`, --help and all."""
  sys.path.insert(
    0, os.getcwd()
  )  # as python -m does: finds modules in this folder
  runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)
