"""Tests of brorl_jax/model/fused_attention.py, without the machines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_policies import TINY, changed

from brorl_jax.many import meshes
from brorl_jax.model import attention, fused_attention
from brorl_jax.model.fused_attention import Real
from brorl_jax.model.spec import Target

CPU, GPU, TPU = (Target(name, 1, 0) for name in ("cpu", "gpu", "tpu"))


def draw(*, P=2, M=3, Q=10, H=6, G=2, K=8, S=7, how="left", own="all"):
  """Arrays, which tokens are real, and the same as masks."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  prefix = None
  if how == "left":
    prefix = np.arange(S) >= np.resize([[S - 1], [2], [0], [S - 2]], (P, 1))
  mask = np.ones((P, 1, Q), bool)
  if own == "left":
    mask[0, :, :4] = False
    if prefix is not None:
      prefix[0] = False
  elif own == "right":
    mask[0, :, 4:] = False
  see = jnp.tril(jnp.ones((Q, Q), bool))[None, None] & mask[:, :, None]
  real = Real(None if own == "all" else jnp.asarray(mask))
  shared = None
  if prefix is not None:
    shared = normal(P, G, S, K), normal(P, G, S, K)
  sides = shared, (normal(P, M, G, Q, K), normal(P, M, G, Q, K))
  masks = None if prefix is None else jnp.asarray(prefix)[:, None, None], see
  real = real._replace(prefix=prefix if prefix is None else jnp.asarray(prefix))
  return normal(P, M, Q, H, K), sides, real, masks


def plain(q, sides, real, masks, softcap=0.0):
  shared, own = sides
  return attention.attend(q, shared and (*shared, masks[0]), (*own, masks[1]),
    scale=0.3, softcap=softcap, target=CPU)  # fmt: skip


def fused(q, sides, real, masks=None, *, target=GPU, mesh=None, softcap=0.0):
  return fused_attention.attend(
    q, *sides, real, scale=0.3, softcap=softcap, target=target, mesh=mesh
  )


@pytest.fixture
def kernels(monkeypatch):
  """cuDNN's function by XLA, and a TPU's kernel by Pallas' interpreter."""

  def cudnn(q, k, v, *, scale, softcap):
    assert not softcap
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)

  monkeypatch.setattr(fused_attention, "_cudnn", cudnn)
  splash = functools.partial(fused_attention._splash, interpret=True)
  monkeypatch.setattr(fused_attention, "_splash", splash)


def compare(form, other, arrays, rows, atol):
  q, sides, real, masks = arrays
  slope = np.random.default_rng(1).normal(size=q.shape) * rows
  found = []
  for each in (form, other):
    run = lambda q, sides, f=each: f(q, sides, real, masks)
    out, pull = jax.vjp(run, q, sides)
    found.append((out * rows, pull(jnp.asarray(slope, out.dtype))))
  assert all(float(jnp.abs(x).max()) > 0.1 for x in jax.tree.leaves(found[0]))
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(a, b, atol=atol)


def counted(real, q):
  """1 where a token is real."""
  own = True if real.own is None else real.own
  return np.asarray(jnp.broadcast_to(own, q.shape[:3]))[..., None, None]


@pytest.mark.parametrize("how, own", [
  ("left", "all"), ("none", "left"), tiers.at_night(("left", "right")),
])  # fmt: skip
def test_rows_as_sequences_are_the_softmax_over_both_kinds(how, own, kernels):
  arrays = draw(how=how, own=own)
  rows = counted(arrays[2], arrays[0])
  compare(fused, plain, arrays, rows, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize(
  "Q, S", tiers.some([(10, 7), (130, 40), (600, 3)], 1, 1)
)
def test_a_tpu_kernel_of_odd_sizes(Q, S, softcap, kernels):
  """Sequences of 17, 170 and 603 tokens; tiles of 128, 256 and 512."""
  arrays = draw(P=1, M=2, Q=Q, S=S, H=2, G=1, K=128)
  form = functools.partial(fused, target=TPU, softcap=softcap)
  other = functools.partial(plain, softcap=softcap)
  compare(form, other, arrays, counted(arrays[2], arrays[0]), 1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("P", [8, tiers.at_night(3)])
def test_a_mesh_cuts_prompts_and_heads(P, kernels):
  mesh = meshes.make_mesh(tensor=2)
  arrays = draw(P=P, H=4)
  form = jax.jit(functools.partial(fused, mesh=mesh))
  compare(form, fused, arrays, counted(arrays[2], arrays[0]), 2e-5)
  kinds = str(jax.make_jaxpr(form)(*arrays[:3]))
  assert f"f32[{P // 4 if P == 8 else P},3,17,2,8]" in kinds  # of a device


def test_inside_a_map_over_prompts_heads_are_cut(kernels):
  mesh = meshes.make_mesh(tensor=2)
  q, sides, real, masks = draw(P=8, H=4)
  split = jax.sharding.PartitionSpec("fsdp")
  form = lambda q, sides, real, masks: jax.jit(jax.shard_map(fused, mesh=mesh,
      in_specs=split, out_specs=split, axis_names={*meshes.ROWS},
      check_vma=False))(q, sides, real)  # fmt: skip
  compare(form, fused, (q, sides, real, masks), counted(real, q), 2e-5)


def test_what_a_machine_has_no_kernel_for():
  real = Real(jnp.ones((2, 1, 10), bool))
  half = lambda K, dtype="bfloat16": jnp.zeros((2, 3, 10, 4, K), dtype)

  def has(target, q, softcap=0.0, **facts):
    return fused_attention.supports(
      target, q, real._replace(**facts), softcap=softcap
    )

  assert has(GPU, half(128)) and has(GPU, half(64)) and has(TPU, half(128))
  assert has(TPU, half(128, "float32")) and has(TPU, half(256))
  assert not has(CPU, half(128)) and not has(Target("rocm", 1, 0), half(128))
  assert not has(GPU, half(128, "float32"))
  assert not has(GPU, half(256)) and not has(GPU, half(60))
  assert not has(GPU, half(64), softcap=1.0) and has(TPU, half(128), 1.0)
  assert not has(TPU, half(64))
  assert has(GPU, half(64), prefix=jnp.ones((2, 40), bool))
  assert not has(GPU, half(64), prefix=jnp.ones((2, 41), bool))


def test_attention_asks_for_the_kernel(monkeypatch):
  """Where `real` says all that the masks say, and only there."""
  asked = []
  monkeypatch.setattr(
    fused_attention, "attend", lambda q, *_, **how: asked.append(how) or q
  )
  q, (_, own), real, (_, see) = draw(how="none")
  args = q.astype(jnp.bfloat16), None, (*own, see)
  run = functools.partial(attention.attend, *args, scale=0.3)
  run(target=GPU, real=real)
  assert len(asked) == 1 and asked[0]["target"] == GPU
  run(target=GPU), run(target=CPU, real=real)
  assert len(asked) == 1


@pytest.mark.slow
def test_a_policy_says_which_of_its_tokens_are_real(kernels, monkeypatch):
  """Prefill, responses, padded rows; and no kernel where layers slide."""
  monkeypatch.setattr(fused_attention, "supports", lambda *_, **__: True)
  on = lambda target, policy: dataclasses.replace(policy, target=target)
  params = TINY.init(jax.random.key(0))
  params = jax.tree.map(lambda x: 5.0 * x, params)
  rng = np.random.default_rng(0)
  tokens = lambda *shape: jnp.asarray(rng.integers(0, TINY.vocab, shape))
  prompt, mask = tokens(2, 5), jnp.asarray([[0, 0, 1, 1, 1], [1] * 5], bool)
  response = tokens(2, 3, 6)

  def found(policy):
    score = lambda params: policy.response_logp(params, prompt, mask, response)
    total = lambda params: sum(x.sum() for x in score(params))
    return (score(params), policy.prefill(params, prompt, mask)[0],
      jnp.where(mask[..., None], policy.logits(params, prompt, mask), 0.0),
      (jax.grad(total)(params)))  # fmt: skip

  assert "_window" in str(jax.make_jaxpr(lambda: found(on(GPU, TINY)))())
  trees = found(on(GPU, TINY)), found(on(CPU, TINY))
  for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))
  sliding = on(GPU, changed(sliding=(True,) * TINY.layers, window=3))
  text = jax.make_jaxpr(lambda: sliding.logits(params, prompt, mask))()
  assert "_window" not in str(text)
