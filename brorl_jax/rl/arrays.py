"""What the functions of this folder share: checks of arrays, and a `Mean`.

Where [B] is meant, a [B, 1] or [B, T] broadcasts silently and gives a wrong
number. Under `jax.jit` a check costs nothing when the function runs: shapes are
known, and traced values are not checked.

chex loads absl, which nothing here needs: imported at the first check.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float


def check(**named: tuple[Any, str]) -> None:
  """Refuses arrays that do not have the axes that are named.

    check(logp=(logp, "BT"), advantage=(advantage, "B"))

  A letter names an axis: equal letters, equal sizes. A leading "*" stands for
  any number of axes, the same in all. None is an optional array that was not
  given. Raises ValueError for the first that is no array or has another shape.

  >>> check(advantage=(jnp.zeros((8, 1)), "B"))
  Traceback (most recent call last):
  ValueError: [Chex] ... [advantage must be [B]]
  """
  import chex

  sizes: dict[str, tuple[int, ...]] = {}
  for name, (value, axes) in named.items():
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
      letters = axes.removeprefix("*")
      for axis, size in zip(letters, shape[rank - len(letters) :], strict=True):
        sizes.setdefault(axis, (size,))
    chex.assert_shape(value, sum((sizes[axis] for axis in axes), ()), **how)


def result(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
  """Shapes and types of what a user's function gives, without computing it.

  It is traced, with `args` that are shapes and types, and `options` as they
  are. Raises ValueError, in one line, if it cannot be called like this.

  >>> rewards = jax.ShapeDtypeStruct((4, 6), jnp.float32)
  >>> described(result(jnp.max, rewards, axis=1))
  'float32[4]'
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


def from_user(function: Callable[..., Any], *, takes: int, gives: str) -> Any:
  """A user's function of (reward, valid, length) or the first of them, [P,N].

  Raises ValueError, in one line, if it cannot be called or gives another shape.

  >>> from_user(jnp.any, takes=1, gives="bool[4]")  # it lacks axis=1
  Traceback (most recent call last):
  ValueError: returns bool[] for 4 prompts of 6 rollouts; it must be bool[4]
  """
  number = jax.ShapeDtypeStruct((4, 6), jnp.float32)
  args = number, jax.ShapeDtypeStruct((4, 6), jnp.bool_), number
  if (got := described(result(function, *args[:takes]))) != gives:
    what = f"returns {got} for 4 prompts of 6 rollouts"
    raise ValueError(f"{what}; it must be {gives}")
  return function


def require(name: str, value: Any, good, must: str) -> None:
  """Refuses a value that is known and not good; traced ones are not known.

  >>> require("p", jnp.array([0.5, 1.5]), lambda p: p <= 1, "at most 1")
  Traceback (most recent call last):
  ValueError: p = 1.5 must be at most 1
  """
  if isinstance(value, Tracer):
    return
  # A traced function knows its constants, but not their sums unless asked for.
  with jax.ensure_compile_time_eval():
    value = jnp.asarray(value)
    fine = jnp.broadcast_to(good(value), value.shape)
    if not bool(jnp.all(fine)):
      bad = value[~fine] if value.ndim else value[None]
      raise ValueError(f"{name} = {bad[0]} must be {must}")


def require_count(name: str, value: Any) -> None:
  """Refuses what is no integer of at least 1; of traced ones not the value.

  >>> require_count("n", 0.5)
  Traceback (most recent call last):
  ValueError: n = 0.5 must be an integer of at least 1
  """
  whole = isinstance(value, int) or (
    getattr(value, "shape", None) == ()
    and jnp.issubdtype(value.dtype, jnp.integer)
  )
  # int(): a comparison of a constant inside a traced function is traced.
  if not whole or (not isinstance(value, Tracer) and int(value) < 1):
    shown = " ".join(repr(value).split())
    raise ValueError(f"{name} = {shown} must be an integer of at least 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A mean kept as numerator and denominator, so that `a + b` is exact.

  Averaging per-microbatch averages weights every microbatch alike, however
  few valid tokens it holds. Adding totals and counts does not.

  >>> one = Mean.of(jnp.array([5.0, 0.0]), jnp.array([True, False]))
  >>> three = Mean.of(jnp.ones(3), jnp.ones(3, bool))
  >>> float((one + three).value)  # 8 / 4, not the mean of 5 and 1
  2.0
  """

  total: Float[Array, ""]  # sum of the values that count
  count: Float[Array, ""]  # how many values that is

  @staticmethod
  def of(
    values: Float[Array, "*axes"],
    where: Bool[Array, "*axes"],
    weight: Float[Array, "*axes"] | None = None,
  ) -> "Mean":
    """Total and count of `values` where `where` is True.

    Elsewhere they may hold anything. `weight`: how often each counts; None: 1.
    """
    check(values=(values, "*"), where=(where, "*"), weight=(weight, "*"))
    if weight is None:
      total = jnp.sum(values, where=where)
      return Mean(total, jnp.sum(where, dtype=jnp.float32))
    total = jnp.sum(jnp.where(where, values, 0.0) * weight)
    return Mean(total, jnp.sum(weight, where=where))

  def __add__(self, other: "Mean") -> "Mean":
    return Mean(self.total + other.total, self.count + other.count)

  @property
  def value(self) -> Float[Array, ""]:
    """The mean; 0 where nothing was counted."""
    return self.total / jnp.where(self.count > 0.0, self.count, 1.0)
