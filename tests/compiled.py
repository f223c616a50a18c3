"""What JAX and XLA make of a program; no test file."""

import contextlib
from collections.abc import Callable

import compiling
import jax
import jax.extend as jex
import jax.numpy as jnp


def compiled(program: Callable, *args, donated=()):
  """`program` compiled for arguments like these.

  Of their leaves: `lower` puts what is no array into the structs that it is
  given, which the checks of their annotations would refuse. XLA makes of it
  what a user's does, which the other programs of tests do without.
  """
  flat, kinds = zip(*map(jax.tree.flatten, args), strict=True)
  of = lambda *x: program(*map(jax.tree.unflatten, kinds, x))
  form = jax.jit(lambda *x: jax.tree.leaves(of(*x)), donate_argnums=donated)
  options = (
    {compiling.EMITTERS: True} if compiling.EMITTERS in compiling.QUICK else {}
  )
  return form.lower(*flat).compile(options)


def zeros_of(program: Callable, *args):
  """Arrays of zeros like those that `program` returns."""
  kinds = []

  def leaves(*args):
    out, kind = jax.tree.flatten(program(*args))
    kinds.append(kind)
    return out

  zeros = lambda x: (
    jnp.broadcast_to(jax.random.key(0), x.shape)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    else jnp.zeros(x.shape, x.dtype)
  )
  out = jax.tree.map(zeros, jax.eval_shape(leaves, *args))
  return jax.tree.unflatten(kinds[0], out)


@contextlib.contextmanager
def compilations():
  """Times, in seconds, that compiling takes while it lasts."""
  seen: list[float] = []

  def listen(event: str, seconds: float, **_):
    if event == "/jax/core/compile/backend_compile_duration":
      seen.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seen
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def equations(jaxpr, name):
  """Those of one kind in a program, the ones in its loops included."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == name:
      yield eqn
    for sub in jex.core.jaxprs_in_params(eqn.params):
      yield from equations(sub, name)
