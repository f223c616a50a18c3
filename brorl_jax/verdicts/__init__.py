"""Puzzles, verifiers and data sets. Never imports jax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from brorl_jax.verdicts import code, gym, instructions, math, own, stem

__all__ = ["code", "gym", "instructions", "math", "own", "stem"]


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
  return __all__
