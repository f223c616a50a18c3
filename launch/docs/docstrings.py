"""An extension of griffe, which reads docstrings for mkdocstrings."""

import pathlib
import sys
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]  (of launch/docs.sh)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from pages import markdown  # pyright: ignore[reportMissingImports]


class Blocks(griffe.Extension):
  """Formulas and examples become blocks, as Markdown has them."""

  def on_object(self, *, obj: Any, **_: Any) -> None:
    if obj.docstring:
      obj.docstring.value = markdown(obj.docstring.value)
