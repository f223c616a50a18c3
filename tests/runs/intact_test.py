"""Tests of brorl_jax/runs/intact.py."""

import errno
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.runs import intact


def test_digest_tells_values_apart_down_to_the_bit():
  of = lambda x: intact.digest({"w": x})["w"]
  zero = jnp.zeros(3)
  assert of(zero) == of(jnp.zeros(3)) and of(zero) != of(-zero)
  assert of(zero) != of(zero.at[1].set(1e-45))
  assert of(np.arange(6.0).reshape(2, 3).T) != of(np.arange(6.0).reshape(3, 2))


def test_description_and_names_by_hand():
  state = {"a": {"b": jnp.zeros((3, 4))}, "c": [np.int32(0)]}
  assert intact.describe(state) == {"a/b": "float32[3, 4]", "c/0": "int32[]"}


def test_a_seal_is_of_what_is_read_back():
  """Numbers as keys become texts."""
  record = {"ledger": {"usual": {7: 1, 30: 2}, "best": None}, "x": [1]}
  sealed = intact.sealed(record)
  text = json.dumps(sealed)
  assert json.loads(text) == sealed and "seal" in sealed
  assert intact.opened(text.encode()) == json.loads(json.dumps(record))


@pytest.mark.parametrize("text", [
  b"", b"\xff", b"[]", b"null", b"{}", b'{"seal": "00"}', b"[" * 9000,
  *(json.dumps(intact.sealed({"a": 1}) | x).encode()
    for x in ({"a": 2}, {"b": 1})),
])  # fmt: skip
def test_what_was_not_sealed_is_damage(text):
  with pytest.raises(intact.Damage):
    intact.opened(text)


def caused(error, by):
  error.__cause__ = by
  return error


def during(error, other):
  error.__context__ = other
  return error


@pytest.mark.parametrize("error, words", [
  (OSError(errno.EIO, "x"), "Input/output error"),
  (MemoryError(), "there is not enough memory"),
  (ValueError("ABORTED: a [os_error_code='116'] b"), "Stale file handle"),
  (ValueError("a [os_error_code=\\'5\\']"), "Input/output error"),
  (ValueError("RESOURCE_EXHAUSTED: more\nlines"), "RESOURCE_EXHAUSTED: more"),
  (RuntimeError("can't start new thread"), "can't start new thread"),
  (caused(ValueError("a"), OSError(errno.EMFILE, "")), "Too many open files"),
  (during(ValueError("a"), OSError(errno.EIO, "")), "Input/output error"),
])  # fmt: skip
def test_what_hinders_reading_is_no_damage(error, words):
  assert intact.unreachable(error) == words


@pytest.mark.parametrize("error", [
  FileNotFoundError(errno.ENOENT, "x"),
  ValueError("NOT_FOUND: [os_error_code='2']"),
  ValueError("DATA_LOSS: checksum"), OSError("no number"), KeyError("seal"),
  intact.Damage("w differs from what was saved"),
])  # fmt: skip
def test_damage_hinders_nobody(error):
  assert intact.unreachable(error) is None


@pytest.mark.parametrize("error, line", [
  (OSError(errno.ENOSPC, "No space", "/a/b"), "/a/b: No space"),
  (OSError(errno.ENOSPC, "No space"), "No space"),
  (ValueError("x [os_error_code='28']\ny"), "No space left on device"),
  (ValueError("first\nsecond"), "first"), (ValueError(), "ValueError"),
  (ValueError("x" * 999), "x" * 300 + "..."),
])  # fmt: skip
def test_an_error_is_told_in_one_line(error, line):
  assert intact.one_line(error) == line


def parts(x, cuts):
  """The sums of an array that is cut along each axis at these places."""
  ranges = [[slice(a, b) for a, b in itertools.pairwise((0, *at, n))]
    for at, n in zip(cuts, x.shape, strict=True)]  # fmt: skip
  every = itertools.product(*ranges)
  return [intact._part(x[index], index, x.shape) for index in every]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_the_sum_of_a_spread_array_does_not_depend_on_the_cut(dtype):
  x = np.random.default_rng(0).normal(size=(6, 5, 4)) * 9
  x = x.astype(dtype)
  whole = intact._part(x)
  for cuts in (((3,), (), ()), ((1, 2), (4,), ()), ((), (2,), (1, 3))):
    assert sum(parts(x, cuts)) % 2**64 == whole
  assert intact._part(np.zeros((), dtype)) == intact._part(np.zeros(1, dtype))


def test_the_sum_tells_values_and_places_apart():
  x = np.zeros((3, 4), np.float32)
  x[1] = 1, 2, 3, 4
  seen = {intact._part(x)}
  for at in np.ndindex(x.shape):  # every bit of every element
    for bit in range(32):
      y = x.copy()
      y.view(np.uint32)[at] ^= 1 << bit
      seen.add(intact._part(y))
  assert len(seen) == 1 + 12 * 32
  assert intact._part(x[:, [1, 0, 2, 3]]) not in seen
  assert intact._part(x[::-1].copy()) == intact._part(x)  # the middle row stays


def test_a_digest_has_the_kind_that_was_saved():
  state = {"w": jnp.arange(3.0), "b": jnp.zeros(2)}
  saved = {"w": f"sum:{intact._part(np.arange(3.0, dtype=np.float32)):016x}"}
  got = intact.digest(state, saved)
  assert got["w"] == saved["w"]
  assert got["b"] == intact.digest(state)["b"] and len(got["b"]) == 64
