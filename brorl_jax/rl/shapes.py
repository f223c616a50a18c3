"""Shape checks at the start of the public functions of this folder, by chex.

Where [B] is meant, a [B, 1] or [B, T] broadcasts silently and gives a wrong
number. Under `jax.jit` the check costs nothing when the function runs.

chex loads absl, which nothing here needs: it is imported at the first check,
not with this folder.
"""

from collections.abc import Callable
from typing import Any

import jax


def check(**arrays: tuple[Any, str]) -> None:
  """Refuses arrays that do not have the axes that are named.

    check(logp=(logp, "BT"), advantage=(advantage, "B"))

  Args:
    **arrays: Each with a letter per axis. An axis has the same size in all of
      them; a leading "*" stands for any number of axes, the same in all. None
      is an optional array that was not given.

  Raises:
    ValueError: The first that is no array or has another shape, by its name.
  """
  import chex

  sizes: dict[str, tuple[int, ...]] = {}
  for name, (value, axes) in arrays.items():
    if value is None:
      continue
    if not hasattr(value, "dtype"):
      kind = type(value).__name__
      raise ValueError(f"{name} is a {kind}; it must be an array")
    shape = value.shape
    if axes.startswith("*"):
      sizes.setdefault("*", shape[: max(len(shape) - len(axes) + 1, 0)])
    how = dict(
      custom_message=f"{name} must be [{', '.join(axes)}]",
      include_default_message=False,
      exception_type=ValueError,
    )
    rank = sum(len(sizes.get(axis, "1")) for axis in axes)
    chex.assert_rank(value, rank, **how)
    if axes != "*":
      named = axes.removeprefix("*")
      for axis, size in zip(named, shape[rank - len(named) :], strict=True):
        sizes.setdefault(axis, (size,))
    want = sum((sizes[axis] for axis in axes), ())
    chex.assert_shape(value, want, **how)


def result(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
  """Shapes and types of what a user's function gives, without computing it.

  Args:
    function: Of arrays, in jax.numpy: it is traced.
    *args: Shapes and types of its arguments.
    **options: Its keyword arguments, as they are.

  Raises:
    ValueError: It cannot be called like this, in one line.
  """
  try:
    return jax.eval_shape(lambda *xs: function(*xs, **options), *args)
  except (Exception, SystemExit) as error:  # it is code, and may raise anything
    code, line = getattr(function, "__code__", None), ""
    trace = error.__traceback__
    while trace is not None:  # the last line of the function's own file
      if code and trace.tb_frame.f_code.co_filename == code.co_filename:
        line = f"line {trace.tb_lineno}: "
      trace = trace.tb_next
    text = (str(error).strip().splitlines() or [""])[0]
    raise ValueError(f"{line}{type(error).__name__}: {text}") from None


def described(x: Any) -> str:
  """float32[3,5], or the type of what is no array."""
  if not (hasattr(x, "shape") and hasattr(x, "dtype")):
    return type(x).__name__
  return f"{x.dtype}[{','.join(map(str, x.shape))}]"
