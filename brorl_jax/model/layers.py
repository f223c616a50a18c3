"""The layers of a decoder.

Only this file uses Flax NNX. A module is merged from a dict of arrays inside
the traced function and does not leave it.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key, PyTree

from brorl_jax.many import meshes
from brorl_jax.model import attention, products, sharding
from brorl_jax.model.attention import View
from brorl_jax.model.spec import PolicySpec
from brorl_jax.model.target import Target
from brorl_jax.rl import vocabulary

# Tokens of a device whose feed-forward exists together: its gradient needs six
# arrays of [tokens, F], 1.8 GB for the 8,960 of a 1.5B policy in bfloat16. For
# 8 rows of 15,360 tokens at once they would be 13 GB.
TILE = 2**14


def _rows(x: Float[Array, "P M Q D"]) -> Float[Array, "n D"]:
  # Matrices, not tensors: the gradient of a weight contracted over two axes
  # takes XLA 5.1 ms on a CPU, and 1.5 ms as a matrix product.
  return x.reshape(-1, x.shape[-1])


class _Norm(nnx.Module):
  """x / sqrt(mean(x^2) + eps) * (offset + scale), in float32."""

  def __init__(self, c: PolicySpec, size: int):
    self.eps, self.offset, self.dtype = c.norm_eps, c.norm_offset, c.dtype
    self.scale = nnx.Param(jnp.full((size,), 1.0 - c.norm_offset, jnp.float32))

  def __call__(self, x: Float[Array, "*axes D"]) -> Float[Array, "*axes D"]:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    scale = self.offset + self.scale[...].astype(jnp.float32)
    return (y * jnp.broadcast_to(scale, y.shape)).astype(self.dtype)


class _Kernel(nnx.Module):
  """A weight that several products use."""

  def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs):
    self.kernel = nnx.Param(
      nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.float32)
    )


_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _einsum(
  c: PolicySpec,
  spec: str,
  kernel: tuple[int, ...],
  *,
  bias: bool,
  rngs: nnx.Rngs,
) -> nnx.Einsum:
  init = nnx.initializers.normal(0.02)
  # A bias has the axes of the output that the input does not have.
  inputs, added = spec.split("->")[0].split(",")
  shape = tuple(
    n for n, axis in zip(kernel, added, strict=True) if axis not in inputs
  )
  return nnx.Einsum(
    spec,
    kernel,
    shape if bias else None,
    dtype=c.dtype,
    kernel_init=init,
    einsum_op=functools.partial(_product, c.target),
    rngs=rngs,
  )


_PRODUCT = "product"


def _product(
  target: Target, spec: str, x: Array, kernel: Array, **options
) -> Array:
  """einsum of rows with a kernel, as a matrix product where that is faster."""
  if not products.half_on_cpu(x, target):
    return jnp.einsum(spec, x, kernel, **options)
  n = math.prod(x.shape[1:])  # contracted axes, the first ones of the kernel
  y = products.dot(x.reshape(-1, n), kernel.reshape(n, -1), target)
  y = y.astype(x.dtype)
  # `products.dot` has its own gradient, inside which `jax.checkpoint` sees no
  # product: the name lets `remat` keep its result.
  y = checkpoint_name(y, _PRODUCT)
  return y.reshape(-1, *kernel.shape[x.ndim - 1 :])


class _Outside(nnx.Module):
  """The modules outside of the layers: embedding and last norm."""

  def __init__(self, c: PolicySpec, *, rngs: nnx.Rngs):
    init = nnx.initializers.normal(0.02)
    self.embed = nnx.Embed(c.vocab, c.width, embedding_init=init, rngs=rngs)
    self.ln_final = _Norm(c, c.width)


class _Block(nnx.Module):
  """One layer: attention and a gated feed-forward, each after an RMSNorm."""

  def __init__(self, c: PolicySpec, *, rngs: nnx.Rngs, form: str):
    D, H, G, K, F = c.width, c.heads, c.kv_heads, c.head_size, c.mlp
    self.policy, self.form = c, form  # see `products.layer_form`
    self.ln_attn = _Norm(c, D)
    self.ln_mlp = _Norm(c, D)
    if c.post_norms:
      self.ln_attn_out = _Norm(c, D)
      self.ln_mlp_out = _Norm(c, D)
    if c.qk_norm:
      self.ln_q = _Norm(c, K)
      self.ln_k = _Norm(c, K)
    product = functools.partial(_einsum, c, rngs=rngs)
    if form == "fused":
      each = H // G + 2
      self.qkv = product("nd,dgjk->ngjk", (D, G, each, K), bias=c.qkv_bias)
    else:
      self.q = product("nd,dhk->nhk", (D, H, K), bias=c.qkv_bias)
      self.k = product("nd,dgk->ngk", (D, G, K), bias=c.qkv_bias)
      self.v = product("nd,dgk->ngk", (D, G, K), bias=c.qkv_bias)
    self.o = product("nhk,hkd->nd", (H, K, D), bias=c.output_bias)
    if c.experts:
      self.router = _Kernel((D, c.experts), rngs=rngs)
      self.expert_gate = _Kernel((c.experts, D, F), rngs=rngs)
      self.expert_up = _Kernel((c.experts, D, F), rngs=rngs)
      self.expert_down = _Kernel((c.experts, F, D), rngs=rngs)
      return
    if form == "turned":
      self.gate_rows = _Kernel((F, D), rngs=rngs)
      self.up_rows = _Kernel((F, D), rngs=rngs)
      self.down_rows = _Kernel((D, F), rngs=rngs)
      return
    if form == "fused":
      self.gate_up = product("nd,dtf->ntf", (D, 2, F), bias=c.mlp_bias)
    else:
      self.gate = product("nd,df->nf", (D, F), bias=c.mlp_bias)
      self.up = product("nd,df->nf", (D, F), bias=c.mlp_bias)
    self.down = product("nf,fd->nd", (F, D), bias=c.mlp_bias)

  def project(
    self, x: Float[Array, "P M Q D"], view: View
  ) -> tuple[Array, Array, Array]:
    """Rotated queries [P,M,Q,H,K], rotated keys and values [P,M,G,Q,K]."""
    h = _rows(self.ln_attn(x))
    apart = lambda y: y.reshape(*x.shape[:3], *y.shape[1:])
    if self.form == "fused":
      heads = self.qkv(h)
      q = heads[:, :, :-2].reshape(len(h), -1, self.policy.head_size)
      k, v = heads[:, :, -2], heads[:, :, -1]
    else:
      q, k, v = self.q(h), self.k(h), self.v(h)
    if self.policy.qk_norm:
      q, k = self.ln_q(q), self.ln_k(k)
    turn = lambda y: attention.rotate(
      apart(y), view.cos, view.sin, self.policy.target
    )
    q, k = turn(q), turn(k)
    return q, jnp.swapaxes(k, 2, 3), jnp.swapaxes(apart(v), 2, 3)

  def close(
    self, x: Float[Array, "P M Q D"], attended: Float[Array, "P M Q H K"]
  ) -> Float[Array, "P M Q D"]:
    """Adds the output of attention, then of the feed-forward."""
    post = self.policy.post_norms
    y = self.o(attended.reshape(-1, *attended.shape[3:]))
    y = _rows(x) + (self.ln_attn_out(y) if post else y)
    z = self.feed_forward(self.ln_mlp(y), len(x))
    y += self.ln_mlp_out(z) if post else z
    return y.reshape(x.shape)

  def feed_forward(
    self, h: Float[Array, "n D"], prompts: int
  ) -> Float[Array, "n D"]:
    c = self.policy
    if c.experts:
      kernels = self.router, self.expert_gate, self.expert_up, self.expert_down
      router, gate, up, down = (x.kernel[...].astype(c.dtype) for x in kernels)
      return products.routed(
        h,
        router,
        gate,
        up,
        down,
        per_token=c.experts_per_token,
        normalize=c.normalize_experts,
      )
    act = _ACTIVATIONS[c.activation]
    if self.form == "turned":
      kernels = self.gate_rows, self.up_rows, self.down_rows
      gate, up, down = (x.kernel[...] for x in kernels)
      return products.gated(h, gate, up, down, act, c.target)
    if self.form == "fused":
      both = self.gate_up(h)
      return self.down(act(both[:, 0]) * both[:, 1])
    gated = lambda h: self.down(act(self.gate(h)) * self.up(h))
    if c.target.on_cpu:
      return gated(h)
    axes = sharding.axes_here(c.mesh)
    rows = math.prod(n for name, n in axes.items() if name in meshes.ROWS)
    here = -(-prompts // rows)
    return products.in_tiles(
      gated, h, prompts=prompts, most=max(TILE // here, 1)
    )


@functools.cache
def _block_graph(c: PolicySpec, form: str) -> nnx.GraphDef:
  make = lambda: _Block(c, rngs=nnx.Rngs(0), form=form)
  return nnx.split(nnx.eval_shape(make))[0]


@functools.cache
def _outside_graph(c: PolicySpec) -> nnx.GraphDef:
  return nnx.split(nnx.eval_shape(lambda: _Outside(c, rngs=nnx.Rngs(0))))[0]


def init(c: PolicySpec, key: Key[Array, ""]) -> PyTree:
  """Random float32 parameters, N(0, 0.02^2), norms 1 and biases 0."""
  k_embed, k_blocks, k_head = jax.random.split(key, 3)
  module = lambda make: (
    lambda k: nnx.to_pure_dict(nnx.state(make(c, rngs=nnx.Rngs(params=k))))
  )
  params = module(_Outside)(k_embed)
  keys = jax.random.split(k_blocks, c.layers)
  trained = functools.partial(_Block, form="trained")
  params["blocks"] = jax.vmap(module(trained))(keys)
  if not c.tied:
    shape = (c.width, c.vocab)
    params["head"] = {"kernel": 0.02 * jax.random.normal(k_head, shape)}
  return params


def block(c: PolicySpec, weights: PyTree) -> _Block:
  """One layer with these parameters, inside a traced function."""
  return nnx.merge(_block_graph(c, products.layer_form(weights)), weights)


def embed(
  c: PolicySpec, params: PyTree, tokens: Int[Array, "*axes"]
) -> Float[Array, "*axes D"]:
  """Embeddings of tokens, scaled as the architecture says."""
  x = _whole(c, params, "embed")["embedding"][tokens].astype(c.dtype)
  return x * jnp.asarray(c.embed_scale, c.dtype)


def final_norm(
  c: PolicySpec, params: PyTree, x: Float[Array, "*axes D"]
) -> Float[Array, "*axes D"]:
  """The norm behind the last layer."""
  outside = {
    "embed": params["embed"],
    "ln_final": _whole(c, params, "ln_final"),
  }
  return nnx.merge(_outside_graph(c), outside).ln_final(x)


def head(
  c: PolicySpec, params: PyTree, x: Float[Array, "*axes D"]
) -> Float[Array, "*axes V"]:
  """Float32 logits of all tokens."""
  return logits(c, x, unembedding(c, params))


def unembedding(c: PolicySpec, params: PyTree) -> Float[Array, "V D"]:
  """The matrix of the head, a row for each token."""
  if c.tied:
    return _whole(c, params, "embed")["embedding"]
  return _whole(c, params, "head")["kernel"].T


def logits(
  c: PolicySpec, x: Float[Array, "*axes D"], rows: Float[Array, "v D"]
) -> Float[Array, "*axes v"]:
  """Float32 logits of the tokens that have these rows of `unembedding`."""
  flat, rows = x.reshape(-1, c.width), rows.astype(x.dtype)
  if products.few(flat, c.target):
    flat = products.weight_first(flat, rows)
  else:
    flat = products.dot(flat, products.turned(rows, c.target), c.target)
  flat = attention.capped(flat, c.final_softcap)
  return flat.reshape(*x.shape[:-1], len(rows))


def token_logp(
  c: PolicySpec,
  params: PyTree,
  hidden: Float[Array, "P M D"],
  tokens: Int[Array, "P M"],
  temperature: float = 1.0,
) -> tuple[Float[Array, "P M"], Float[Array, "P M"]]:
  """Log-probability of each token, and entropy, from hidden states.

  Tiles of tokens and of the vocabulary: memory does not grow with V, except for
  the embedding and its gradient.
  """
  P, M = tokens.shape
  devices = math.prod(sharding.axes_here(c.mesh).values())
  rows, block = vocabulary.tile_shape(
    M, c.vocab, P, devices=devices, on_cpu=c.target.on_cpu
  )
  return vocabulary.token_logp(
    lambda x, rows: logits(c, x, rows) / temperature,
    unembedding(c, params),
    hidden,
    tokens,
    rows=rows,
    block=block,
    spread=devices > 1,
  )


def _whole(c: PolicySpec, params: PyTree, name: str) -> PyTree:
  return sharding.gathered(params[name], c.mesh, c.dtype, inside=f"{name}/")


def rematerialized(layer: Callable, remat: str) -> Callable:
  """`layer` with a backward pass that recomputes what `remat` says.

  A scan stores residuals of all layers in zeroed buffers. Recomputing whole
  layers took .20 CPU-s per update of the embedded policy, storing all .25.
  """
  if remat == "nothing":
    return layer
  keep = jax.checkpoint_policies
  kept = {
    "layer": keep.nothing_saveable,
    "products": keep.save_from_both_policies(
      keep.dots_with_no_batch_dims_saveable,
      keep.save_only_these_names(_PRODUCT),
    ),
  }
  return jax.checkpoint(layer, policy=kept[remat], prevent_cse=False)
