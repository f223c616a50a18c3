"""Tests of brorl_jax/rl/arrays.py."""

import importlib
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

import brorl_jax.rl
from brorl_jax.rl import (
  advantages,
  arrays,
  corrections,
  length_penalty,
  losses,
  mass_balance,
  simulator,
  vocabulary,
)
from brorl_jax.rl.arrays import Mean, require, require_count

B, T, P, N, V = 4, 6, 3, 5, 8
KEY = object()  # a new one for each call
pytestmark = pytest.mark.usefixtures("unhooked")


def normal(*shape):
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def mask(*shape):
  return jnp.ones(shape, bool)


def one_by_one(reward, valid, length):
  return advantages.leave_one_out(reward, valid)


LOGP = {"logp": -(normal(B, T) ** 2), "logp_old": -(normal(B, T) ** 2)}
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
BAND = {"low": 0.5, "high": 2.0}
POLICY = LOGP | dict(advantage=normal(B), mask=mask(B, T), weight=normal(B))
PAIR = {"logp_train": normal(B, T), "logp_sampler": normal(B, T)}
REWARD = {"reward": normal(P, N), "valid": mask(P, N)}
TOKENS = {"probs": jnp.full(V, 1 / V),
  "correct": jnp.arange(V) < 2, "sampled": jnp.arange(V) < 3}  # fmt: skip
STEP = {"reward_correct": 1.0, "reward_wrong": -1.0, "lr": 0.1, "n": 4}
# Function: arguments with which it works. Those that are arrays must be refused
# with one axis more, and with one axis less.
DOORS = {
  length_penalty.repeats: dict(
    tokens=jnp.zeros((P, N, T), int), mask=mask(P, N, T), size=2
  ),
  losses.policy_loss: POLICY | CLIP | dict(
    loss=losses.LOSSES["ppo"], scale=normal(B), correction=normal(B, T)
  ),
  losses.kl_k2: dict(
    logp=normal(B, T), logp_ref=normal(B, T), mask=mask(B, T),
    weight=normal(B), clamp=10.0,
  ),
  losses.token_logp: dict(
    logits=normal(B, T, V), tokens=jnp.zeros((B, T), int)
  ),
  losses.log_ratio: dict(logp=normal(B, T), other=normal(B, T)),
  losses.sequence_log_ratio: dict(
    logp=normal(B, T), other=normal(B, T), mask=mask(B, T)
  ),
  losses.per_token: dict(weight=normal(B), mask=mask(B, T)),
  corrections.truncated_weight: PAIR | dict(cap=2.0),
  corrections.banded_weight: PAIR | BAND,
  corrections.sequence_mask: PAIR | dict(mask=mask(B, T)) | BAND,
  advantages.informative: REWARD,
  advantages.center_by_group: REWARD,
  advantages.leave_one_out: REWARD,
  advantages.maxrl: REWARD,
  advantages.pass_at_k: REWARD | dict(k=2),
  advantages.each_prompt_once: REWARD | dict(
    function=one_by_one, length=normal(P, N), whitened=False
  ),
  advantages.normalize_by_group: dict(centered=normal(P, N), valid=mask(P, N)),
  advantages.whiten_by_batch: dict(
    advantage=normal(P, N), length=normal(P, N), where=mask(P)
  ),
  advantages.partly_solved: REWARD,
  mass_balance.mass_balance: TOKENS | STEP,
  mass_balance.mass_balance_counts: dict(
    probs=TOKENS["probs"], correct=TOKENS["correct"],
    counts=(jnp.arange(V) < 2) * 2, **STEP,
  ),
  simulator.weighted_by_probability: dict(
    probs=normal(V), reward=normal(V), n=4
  ),
  simulator.log_probability: dict(probs=normal(V), reward=normal(V), n=4),
  simulator.draw_counts: dict(key=KEY, probs=TOKENS["probs"], n=4),
  Mean.of: dict(
    values=normal(B, T), where=mask(B, T), weight=normal(B, T)
  ),
  vocabulary.token_logp: dict(
    logits=lambda hidden, head: hidden @ head.T, head=normal(V, 2),
    hidden=normal(P, N, 2), tokens=jnp.zeros((P, N), int), rows=2, block=4,
  ),
}  # fmt: skip
# Elementwise in one array, or of no array at all.
ANY_SHAPE = {
  *("length_penalty." + name for name in ("cosine", "is_active", "overlong")),
  "lr_scaling.sqrt_scaled",
  "mass_balance.expected_unsampled_second_moment",
  "pass_at_k.pass_at_k",
  *("simulator." + name for name in ("initial_logits", "simulate")),
  *("arrays." + name for name in ("check", "described", "result")),
  *("arrays.require" + name for name in ("", "_count")),
  "vocabulary.tile_shape",
  *(name + ".from_user" for name in ("arrays", "losses")),
}


def name_of(function):
  module = inspect.unwrap(function).__module__.split(".")[-1]
  return f"{module}.{function.__name__}"


def public():
  for path in pathlib.Path(brorl_jax.rl.__path__[0]).glob("[!_]*.py"):
    module = importlib.import_module(f"brorl_jax.rl.{path.stem}")
    for name, value in vars(module).items():
      if (callable(value) and getattr(value, "__module__",
          None) == module.__name__ and name[0] != "_" and not isinstance(value,
          type)):  # fmt: skip
        yield f"{path.stem}.{getattr(value, '__name__', name)}"


def test_every_public_function_is_here():
  known = {name_of(f) for f in DOORS if f is not Mean.of} | ANY_SHAPE
  assert {name for name in public() if "<lambda>" not in name} == known


WRONG = [pytest.param(function, name, id=f"{name_of(function)}-{name}")
  for function, args in DOORS.items()
  for name, value in args.items() if isinstance(value, jax.Array)]  # fmt: skip


def call(function, args):
  key = {"key": jax.random.key(0)} if "key" in args else {}
  return function(**{**args, **key})


@pytest.mark.parametrize("function, name", tiers.some(WRONG, 1, 16))
def test_a_wrong_rank_is_refused_by_name(function, name):
  args = DOORS[function]
  call(function, args)
  x, longer = args[name], args[name][..., None]
  for wrong in (longer, jnp.broadcast_to(longer, (*x.shape, T)), x[0]):
    with pytest.raises(ValueError, match=r"rank|shape") as error:
      call(function, {**args, name: wrong})
    # Of the first array the others are told to differ.
    first = next(k for k, v in args.items() if isinstance(v, jax.Array))
    told = "" if name == first else f"[{name} "
    said = str(error.value)
    assert "\n" not in said and f"{told}must be [" in said


@pytest.mark.parametrize("function, name", tiers.some(WRONG, 6))
def test_another_size_of_an_axis_is_refused(function, name):
  """But where it is the only array that has the axis."""
  args = DOORS[function]
  for axis in range(args[name].ndim):
    wrong = {**args, name: jnp.repeat(args[name], 2, axis=axis)}
    others = [
      x.shape for k, x in args.items() if isinstance(x, jax.Array) and k != name
    ]
    if any(args[name].shape[axis] in shape for shape in others):
      with pytest.raises(ValueError, match=r"must be \["):
        call(function, wrong)


def test_messages_by_hand():
  check = arrays.check
  check(a=(normal(3, 2), "AB"), b=(None, "A"), c=(normal(2), "B"))
  check(a=(normal(3, 2), "*"), b=(normal(3, 2), "*"))
  check(a=(normal(4), "*V"))
  check(a=(normal(3, 2, 4), "*V"), b=(normal(3, 2), "*"), c=(normal(4), "V"))
  for given, message in (
    (
      {"a": (normal(3, 2), "AB"), "b": (normal(3, 1), "A")},
      r"rank 2 \(shape \(3, 1\)\) but expected 1\. \[b must be \[A\]\]",
    ),
    (
      {"a": (normal(3, 2), "AB"), "b": (normal(2), "A")},
      r"shape \(2,\) but expected \(3\)\. \[b must be \[A\]\]",
    ),
    ({"a": (normal(3, 3), "*"), "b": (normal(3, 1), "*")}, r"b must be \[\*\]"),
    ({"a": (normal(3, 2), "AA")}, r"a must be \[A, A\]"),
    ({"a": (jnp.zeros(()), "*V")}, r"a must be \[\*, V\]"),
    ({"a": ([1.0], "A")}, "a is a list; it must be an array"),
    ({"a": (1.0, "*")}, "a is a float; it must be an array"),
  ):
    with pytest.raises(ValueError, match=message):
      check(**given)


def test_a_function_that_fails_is_told_with_its_line():
  def own(x):
    return x @ jnp.ones(7)

  line = own.__code__.co_firstlineno + 1
  struct = jax.ShapeDtypeStruct((3,), jnp.float32)
  with pytest.raises(ValueError, match=rf"^line {line}: TypeError: ") as error:
    arrays.result(own, struct)
  assert "\n" not in str(error.value)
  assert arrays.described(arrays.result(lambda x: x > 0, struct)) == "bool[3]"
  assert arrays.described({}) == "dict"


def test_a_count_is_an_integer_of_at_least_1():
  for value in (0, -3, 2.0, None, "3", np.float32(3), np.zeros(2, int)):
    with pytest.raises(ValueError, match=r"^n = "):
      require_count("n", value)
  shown = r"^n = Array\(\[\[1, 1\], \[1, 1\]\], dtype=int32\) must"
  with pytest.raises(ValueError, match=shown):
    require_count("n", jnp.ones((2, 2), "i4"))
  for value in (1, np.int32(3), np.uint8(3), jnp.int32(3), np.array(2)):
    require_count("n", value)


def test_the_first_value_that_is_out_of_range_is_named():
  p = jnp.array([0.5, 1.5, -2.0])
  with pytest.raises(ValueError, match=r"^p = 1\.5 must be at most 1$"):
    require("p", p, lambda x: x <= 1, "at most 1")
  with pytest.raises(ValueError, match=r"^lr = nan must be finite$"):
    require("lr", float("nan"), jnp.isfinite, "finite")


def test_traced_values_are_not_known_and_constants_are():
  good = lambda x: x > 0
  jax.jit(lambda x: require("x", x, good, "above 0"))(-1.0)
  with pytest.raises(ValueError, match=r"^y = -1"):
    jax.jit(lambda x: require("y", -1.0, good, "above 0"))(1.0)


VALUES = jnp.array([[1.0, 2.0, 6.0], [4.0, 5.0, 9.0]])
WHERE = jnp.array([[True, True, False], [False, True, False]])


def test_counts_what_the_mask_says():
  mean = Mean.of(VALUES, WHERE)
  assert (float(mean.total), float(mean.count)) == (8.0, 3.0)
  assert float(mean.value) == pytest.approx(8 / 3)


def test_a_weight_of_c_is_c_copies():
  mean = Mean.of(VALUES, WHERE, jnp.array([[2.0, 0.0, 7.0], [7.0, 3.0, 7.0]]))
  assert (float(mean.total), float(mean.count)) == (17.0, 5.0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("weight", [None, jnp.ones((2, 3))])
def test_what_does_not_count_may_be_anything(bad, weight):
  values = jnp.where(WHERE, VALUES, bad)
  assert float(Mean.of(values, WHERE, weight).value) == pytest.approx(8 / 3)


@pytest.mark.parametrize("weight", [None, jnp.ones((2, 3))])
def test_nothing_counted_is_0_with_a_gradient_of_0(weight):
  nothing = jnp.zeros((2, 3), bool)
  of = lambda x: Mean.of(x, nothing, weight).value
  value, gradient = jax.value_and_grad(of)(VALUES)
  assert float(value) == 0.0
  np.testing.assert_array_equal(gradient, 0.0)


def test_a_count_below_1_still_divides():
  mean = Mean.of(jnp.array([3.0]), jnp.array([True]), jnp.array([0.5]))
  assert float(mean.value) == 3.0


def test_parts_add_up_in_a_scan():
  step = lambda total, xw: (total + Mean.of(*xw), None)
  zero = Mean(jnp.zeros(()), jnp.zeros(()))
  total, _ = jax.jit(lambda: jax.lax.scan(step, zero, (VALUES, WHERE)))()
  assert float(total.value) == pytest.approx(8 / 3)
