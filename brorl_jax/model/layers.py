"""The layers of a decoder, and products in the form that suits a machine.

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
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

from brorl_jax.many import meshes
from brorl_jax.model import adapters, attention, sharding
from brorl_jax.model.attention import View
from brorl_jax.model.spec import PolicySpec, Target
from brorl_jax.rl import vocabulary

# Tokens of a device whose feed-forward exists together: its gradient needs six
# arrays of [tokens, F], 1.8 GB for the 8,960 of a 1.5B policy in bfloat16. For
# 8 rows of 15,360 tokens at once they would be 13 GB.
TILE = 2**14
# Tokens of a large tile are a multiple: others take a TPU's compiler minutes.
_UNIT = 128
# Rows, at most, of a product in which the weight comes first.
_FEW = 128
# Rows, at most, that every expert computes. With 32 experts of Qwen3-30B-A3B
# 1,024 take .5 ms at 650 TFLOP/s, as long as launching 32 blocks.
EVERY = 2**10
_INIT = nnx.initializers.normal(0.02)


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
  def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs):
    self.kernel = nnx.Param(_INIT(rngs.params(), shape, jnp.float32))


_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


_PRODUCT = "product"


def _as_matrices(
  target: Target, spec: str, x: Array, kernel: Array, **options
) -> Array:
  """einsum of rows with a kernel, as a matrix product where that is faster."""
  if not half_on_cpu(x, target):
    return jnp.einsum(spec, x, kernel, **options)
  n = math.prod(x.shape[1:])  # contracted axes, the first ones of the kernel
  y = half_dot(x.reshape(-1, n), kernel.reshape(n, -1)).astype(x.dtype)
  # `half_dot` has its own gradient, inside which `jax.checkpoint` sees no
  # product: the name lets `remat` keep its result.
  y = checkpoint_name(y, _PRODUCT)
  return y.reshape(-1, *kernel.shape[x.ndim - 1 :])


class _Outside(nnx.Module):
  def __init__(self, c: PolicySpec, *, rngs: nnx.Rngs):
    self.embed = nnx.Embed(c.vocab, c.width, embedding_init=_INIT, rngs=rngs)
    self.ln_final = _Norm(c, c.width)


class _Block(nnx.Module):
  """One layer: attention and a gated feed-forward, each after an RMSNorm."""

  def __init__(self, c: PolicySpec, *, rngs: nnx.Rngs, form: str):
    D, H, G, K, F = c.width, c.heads, c.kv_heads, c.head_size, c.mlp
    self.policy, self.form = c, form  # see `layer_form`
    self.ln_attn = _Norm(c, D)
    self.ln_mlp = _Norm(c, D)
    if c.post_norms:
      self.ln_attn_out = _Norm(c, D)
      self.ln_mlp_out = _Norm(c, D)
    if c.qk_norm:
      self.ln_q = _Norm(c, K)
      self.ln_k = _Norm(c, K)
    einsum = functools.partial(_as_matrices, c.target)
    how = {"dtype": c.dtype, "kernel_init": _INIT, "einsum_op": einsum}

    def product(spec: str, kernel: tuple[int, ...], bias: bool) -> nnx.Einsum:
      # A bias has the axes of the output that the input does not have.
      inputs, added = spec.split("->")[0].split(",")
      axes = zip(kernel, added, strict=True)
      own = tuple(n for n, axis in axes if axis not in inputs)
      return nnx.Einsum(spec, kernel, own if bias else None, rngs=rngs, **how)

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
    target = self.policy.target
    turn = lambda y: attention.rotate(apart(y), view.cos, view.sin, target)
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
    act = _ACTIVATIONS[c.activation]
    if c.experts:
      kernels = self.router, self.expert_gate, self.expert_up, self.expert_down
      return routed(
        h,
        *(x.kernel[...].astype(c.dtype) for x in kernels),
        per_token=c.experts_per_token,
        normalize=c.normalize_experts,
        target=c.target,
        mesh=c.mesh,
      )
    if self.form == "turned":
      kernels = self.gate_rows, self.up_rows, self.down_rows
      gate, up, down = (x.kernel[...] for x in kernels)
      return feed_forward(h, gate, up, down, act, c.target)
    if self.form == "fused":
      both = self.gate_up(h)
      return self.down(act(both[:, 0]) * both[:, 1])
    gated = lambda h: self.down(act(self.gate(h)) * self.up(h))
    if c.target.on_cpu:
      return gated(h)
    axes = sharding.axes_here(c.mesh)
    rows = math.prod(n for name, n in axes.items() if name in meshes.ROWS)
    here = -(-prompts // rows)
    return in_tiles(gated, h, prompts=prompts, most=max(TILE // here, 1))


@functools.cache
def _graph(
  module: Callable[..., nnx.Module], c: PolicySpec, **form: str
) -> nnx.GraphDef:
  make = lambda: module(c, rngs=nnx.Rngs(0), **form)
  return nnx.split(nnx.eval_shape(make))[0]


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
  if c.lora_rank:
    params = adapters.join(adapters.init(c, params["blocks"], key), params)
  return params


def block(c: PolicySpec, weights: PyTree) -> _Block:
  """One layer with these parameters, inside a traced function."""
  trained, frozen = adapters.split({"blocks": weights})
  base = (frozen or trained)["blocks"]
  out = nnx.merge(_graph(_Block, c, form=layer_form(weights)), base)
  for name in trained["blocks"] if frozen else ():
    module = trained["blocks"][name]
    setattr(out, name, _adapted(c, name, getattr(out, name), **module))
  return out


def _adapted(
  c: PolicySpec, name: str, product: Callable, lora_a: Array, lora_b: Array
) -> Callable[[Array], Array]:
  """x W + scale (x a) b of the module with this product x W."""
  within, apart = "hk"[: adapters.inputs(name)], "xy"[: lora_b.ndim - 1]

  def apply(x: Array) -> Array:
    times = functools.partial(_as_matrices, c.target)
    a, b = (y.astype(c.dtype) for y in (lora_a, lora_b))
    low = times(f"n{within},{within}r->nr", x, a)
    return product(x) + c.lora_scale * times(f"nr,r{apart}->n{apart}", low, b)

  return apply


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
  norm = _whole(c, params, "ln_final")
  outside = {"embed": params["embed"], "ln_final": norm}
  return nnx.merge(_graph(_Outside, c), outside).ln_final(x)


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
  if few(flat, c.target):
    flat = weight_first(flat, rows)
  else:
    half = half_on_cpu(flat, c.target)
    dot = half_dot if half else _float32_dot
    flat = dot(flat, turned(rows) if half else rows.T)
  flat = attention.capped(flat, c.final_softcap)
  return flat.reshape(*x.shape[:-1], len(rows))


def token_logp(
  c: PolicySpec,
  params: PyTree,
  hidden: Float[Array, "P M D"],
  tokens: Int[Array, "P M"],
  temperature: float = 1.0,
) -> tuple[Float[Array, "P M"], Float[Array, "P M"]]:
  """Log-probability of each token, and entropy, from hidden states. In tiles of
  tokens and vocabulary: only the embedding and its gradient grow with V.
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
  """`layer` with a backward pass that recomputes what `remat` says. A scan
  stores residuals of all layers in zeroed buffers: recomputing whole layers
  took .20 CPU-s per update of the embedded policy, storing all .25.
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


_float32_dot = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def half_on_cpu(x: Array, target: Target) -> bool:
  """Whether a product takes the form of `half_dot`."""
  return x.dtype == jnp.bfloat16 and target.on_cpu


@jax.custom_vjp
def half_dot(
  x: Float[Array, "m k"], w: Float[Array, "k n"]
) -> Float[Array, "m n"]:
  """x @ w in float32, of bfloat16 on a CPU; gradients in bfloat16.

  XLA's kernels are twice as fast as in float32, but only for row-major x @ w
  with a float32 result. XLA folds a transposed operand into the product and
  multiplies such products in float32: 140 to 210 GFLOP/s per core of an AMD
  Zen 5, where x @ w has 400 to 450. Gradients are products with transposed
  operands.
  """
  return _float32_dot(x, w)


def _half_dot_backward(saved, slope):
  x, w = saved
  slope = slope.astype(x.dtype)
  return (
    half_dot(slope, turned(w)).astype(x.dtype),
    half_dot(turned(x), slope).astype(w.dtype),
  )


half_dot.defvjp(lambda x, w: (half_dot(x, w), (x, w)), _half_dot_backward)


def turned(x: Float[Array, "m n"]) -> Float[Array, "n m"]:
  """x', written row by row: XLA finds no transpose behind a concatenation."""
  if len(x) < 2:
    return x.T
  half = x.shape[1] // 2
  return jnp.concatenate([x[:, :half].T, x[:, half:].T])


def few(x: Float[Array, "n d"], target: Target) -> bool:
  """Whether a weight should come first: few rows in float32 on a CPU.

  There XLA copies the second operand into panels before it multiplies. For few
  rows that costs as much as the product if it is the weight, and nothing if
  the weight comes first: w x' is [out, rows] then, and is turned back. GFLOP
  per CPU-second of a feed-forward, of 104 at best:

    rows   256 wide   512 wide   1,024 wide
    16                54 -> 61   54 -> 78
    64     71 -> 94   82 -> 92   83 -> 100
    128    91 -> 97   93 -> 98   93 -> 101

  and of a head of 64 rows, 512 wide, with V = 32,768: 57 -> 68.
  """
  return target.on_cpu and x.dtype == jnp.float32 and len(x) <= _FEW


def weight_first(
  x: Float[Array, "n d"], w: Float[Array, "out d"]
) -> Float[Array, "n out"]:
  """x @ w', for few rows."""
  return _turned_back(_product(w, x))


def feed_forward(
  x: Float[Array, "n D"],
  gate: Float[Array, "F D"],
  up: Float[Array, "F D"],
  down: Float[Array, "D F"],
  activation: Callable[[Array], Array],
  target: Target,
) -> Float[Array, "n D"]:
  """(activation(x @ gate') * (x @ up')) @ down', for any number of rows."""
  if not few(x, target):
    return (activation(x @ gate.T) * (x @ up.T)) @ down.T
  inner = activation(_product(gate, x)) * _product(up, x)  # F n
  return _turned_back(down @ inner)


def _product(w: Float[Array, "a d"], x: Float[Array, "b d"]) -> Array:
  """w @ x', which XLA multiplies without writing x'."""
  return jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())))


def _turned_back(y: Float[Array, "out n"]) -> Float[Array, "n out"]:
  # Alone, a transpose takes XLA .5 to 2 ns per number; as part of another loop
  # 5 ns, and the product with it 2 ms instead of 1.4.
  alone = jax.lax.optimization_barrier
  return alone(alone(y).T)


def in_tiles(
  f: Callable[[Array], Array],
  x: Float[Array, "n D"],
  *,
  prompts: int,
  most: int,
) -> Float[Array, "n D"]:
  """f(x), where f acts on every token by itself.

  The tiles are computed one after the other, and once more in the backward
  pass, so that what f needs for itself is there for one of them. A tile has
  up to `most` tokens of each of the `prompts`, a divisor of n, which may be
  spread over devices; x has them prompt by prompt.
  """
  n, D = x.shape
  each = n // prompts
  tiles = -(-each // most)
  if tiles == 1:
    return f(x)
  tile = -(-each // tiles)
  if tile > _UNIT:
    tile = -(-tile // _UNIT) * _UNIT
  x = x.reshape(prompts, each, D)
  x = jnp.pad(x, ((0, 0), (0, tiles * tile - each), (0, 0)))
  apart = jnp.swapaxes(x.reshape(prompts, tiles, -1, D), 0, 1)
  of_tile = lambda x: f(x.reshape(-1, D)).reshape(x.shape)
  out = jax.lax.map(jax.checkpoint(of_tile, prevent_cse=False), apart)
  out = jnp.swapaxes(out, 0, 1).reshape(prompts, -1, D)[:, :each]
  return out.reshape(n, D)


def routed(
  x: Float[Array, "n D"],
  router: Float[Array, "D E"],
  gate: Float[Array, "E D F"],
  up: Float[Array, "E D F"],
  down: Float[Array, "E F D"],
  *,
  per_token: int,
  normalize: bool,
  target: Target,
  mesh: Mesh | None = None,
) -> Float[Array, "n D"]:
  """Sum over a token's experts of their share times their SwiGLU.

    share = softmax(x router), the largest `per_token` of each token
    out   = sum over these e of share_e * (silu(x gate_e) * (x up_e)) down_e

  Nothing is dropped. With experts spread over devices every device computes
  its own and the results are added; weights do not move. `normalize` scales the
  shares of the chosen ones so that they add up to 1. Shazeer et al. 2017,
  arXiv:1701.06538; Yang et al. 2025 (Qwen3), arXiv:2505.09388.
  """
  logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
  share, chosen = jax.lax.top_k(jax.nn.softmax(logits), per_token)
  if normalize:
    share /= jnp.sum(share, axis=-1, keepdims=True)
  args = x, share, chosen, gate, up, down
  if target.on_cpu:
    return _sorted(*args)
  return every_expert(*args) if len(x) <= EVERY else by_expert(mesh, *args)


def _sorted(x, share, chosen, gate, up, down) -> Float[Array, "n D"]:
  """Rows sorted by expert, for CPUs. On GPUs XLA masks a copy of all rows for
  each expert: 480 GiB for 122,880 tokens of Qwen3-30B-A3B (jax 0.10.2).
  """
  expert = chosen.reshape(-1)
  order = jnp.argsort(expert, stable=True)
  rows = jnp.bincount(expert, length=len(gate)).astype(jnp.int32)
  product = lambda a, b: jax.lax.ragged_dot(a, b, rows)
  ours = x[order // chosen.shape[1]]
  y = product(jax.nn.silu(product(ours, gate)) * product(ours, up), down)
  y = y[jnp.argsort(order)].reshape(*chosen.shape, -1)
  return jnp.sum(share.astype(y.dtype)[..., None] * y, axis=1)


def every_expert(x, share, chosen, gate, up, down) -> Float[Array, "n D"]:
  """All experts for all of a few rows, which count 0 where they are not chosen.
  A decode step reads all experts anyway; XLA cuts products as the weights are.
  """
  each = share[..., None] * jax.nn.one_hot(chosen, len(gate))  # n per_token E
  weight = jnp.sum(each, axis=1).T[..., None]
  rows = jnp.broadcast_to(x, (len(gate), *x.shape))
  inner = jax.nn.silu(rows @ gate) * (rows @ up)
  inner = jnp.where(weight > 0.0, weight.astype(x.dtype) * inner, 0.0)
  return jnp.einsum("enf,efd->nd", inner, down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_expert(mesh, x, share, chosen, *weights) -> Float[Array, "n D"]:
  """A loop over blocks of rows of one expert, for many rows: each is gathered,
  multiplied and added to a float32 sum. No array has D or F numbers for each
  token and expert. A device loops over as many blocks as its experts have.
  """
  return _over_experts(mesh, x, share, chosen, *weights)[0].astype(x.dtype)


def _by_expert_backward(mesh, saved, slope: Float[Array, "n D"]):
  x, share, _, *weights = saved
  found = _over_experts(mesh, *saved, slope)
  like = zip(found, (x, share, *weights), strict=True)
  dx, dshare, *dweights = (d.reshape(a.shape).astype(a.dtype) for d, a in like)
  return dx, dshare, None, *dweights


by_expert.defvjp(lambda mesh, *x: (by_expert(mesh, *x), x), _by_expert_backward)


def _over_experts(mesh, x, share, chosen, *more) -> list[Array]:
  """`_sums` of each device for its own experts; those of tokens are added."""
  numbers = jnp.arange(len(more[0]), dtype=jnp.int32)
  # Of an expert's mean a quarter, so that an eighth is empty, up to 1,024.
  block = min(max(chosen.size // (4 * len(numbers)) // _UNIT, 1), 8) * _UNIT
  sums = functools.partial(_sums, block)
  axes = sharding.axes_here(mesh)
  if math.prod(axes.get(name, 1) for name in meshes.WITHIN) == 1:
    return sums(numbers, x, share, chosen, *more)

  def added(*args):
    of_tokens, *out = sums(*args)
    first = [of_tokens.astype(x.dtype), *out[:1]]
    return [*jax.lax.psum(first, meshes.WITHIN), *out[1:]]

  apart, whole = PartitionSpec(meshes.WITHIN), PartitionSpec()
  places = (apart, *[whole] * 3, *[apart] * 3, whole)[: 4 + len(more)]
  out = [whole] if len(more) == 3 else [*[whole] * 2, *[apart] * 3]
  each = sharding.on_devices(added, places, out, meshes.WITHIN, mesh)
  return each(numbers, x, share, chosen, *more)


def _sums(block, numbers, x, share, chosen, *more) -> list[Array]:
  """Results of experts `numbers`; or, from slope, their gradients."""
  weights, slope = more[:3], more[3:]
  expert = chosen.ravel()
  order = jnp.argsort(expert, stable=True).astype(jnp.int32)
  edges = jnp.append(numbers, numbers[-1] + 1)
  start = jnp.searchsorted(expert[order], edges).astype(jnp.int32)
  each = -(-jnp.diff(start) // block)
  last = jnp.cumsum(each)  # blocks up to each expert

  def find(b: Array) -> tuple[Array, Array]:
    """Expert and rows of `expert` of a block; the last one of an expert is
    filled up with n k, of which there is no row.
    """
    e = jnp.searchsorted(last, b, side="right")
    at = start[e] + (b - (last - each)[e]) * block + jnp.arange(block)
    return e, jnp.where(at < start[e + 1], order[at], chosen.size)

  take = lambda a, at: a.at[at].get(mode="fill", fill_value=0)

  def swiglu(x, share, gate, up, down):
    inner = jax.nn.silu(x @ gate) * (x @ up)
    return (share[:, None].astype(x.dtype) * inner) @ down

  def add(b, sums):
    e, rows = find(b)
    token = rows // chosen.shape[1]
    args = take(x, token), take(share.ravel(), rows), *[w[e] for w in weights]
    out, back = jax.vjp(swiglu, *args)
    found = back(take(slope[0], token)) if slope else [out]
    parts = zip(sums, (token, rows, e, e, e), found, strict=False)
    return [s.at[i].add(m.astype(s.dtype), mode="drop") for s, i, m in parts]

  like = (x, share.ravel(), *weights) if slope else (x,)
  zeros = [jnp.zeros(a.shape, jnp.float32) for a in like]
  return jax.lax.fori_loop(0, last[-1], add, zeros)


def layer_form(layer: PyTree) -> str:
  """In which form the weights of a layer are.

  trained  as they are stored
  fused    of decoding on accelerators: fewer, larger weights
  turned   of decoding on CPUs in float32: the feed-forward's lie output by
           output, since a weight comes first in a product of few rows
  """
  if "qkv" in layer:
    return "fused"
  return "turned" if "gate_rows" in layer else "trained"


def turned_layer(layer: PyTree) -> PyTree:
  """One layer with a transposed feed-forward: [F,D], [F,D] and [D,F]."""
  names = ("gate", "up", "down")
  rest = {name: x for name, x in layer.items() if name not in names}
  rows = {f"{name}_rows": {"kernel": layer[name]["kernel"].T} for name in names}
  return rest | rows


def fused_layer(c: PolicySpec, layer: PyTree) -> PyTree:
  """One layer with one product instead of three, and one instead of two.

  A decode step multiplies a few hundred rows: its time is that of reading
  weights and of launching kernels. XLA joins products by itself only where a
  weight is small, below 32 MB. `qkv` [D,G,J+2,K] has the J queries, the key and
  the value of each key/value head, `gate_up` is [D,2,F]. On a mesh heads and F
  stay on their devices. Routed experts stay as they are.
  """
  rest = dict(layer)
  G, K = c.kv_heads, c.head_size
  q, k, v = (rest.pop(name) for name in "qkv")

  def heads(name: str) -> Array:
    grouped = q[name].reshape(*q[name].shape[:-2], G, -1, K)
    alone = (x[name][..., None, :] for x in (k, v))
    return jnp.concatenate([grouped, *alone], axis=-2)

  rest["qkv"] = {name: heads(name) for name in q}
  if not c.experts:
    gate, up = rest.pop("gate"), rest.pop("up")
    both = lambda name: jnp.stack([gate[name], up[name]], axis=-2)
    rest["gate_up"] = {name: both(name) for name in gate}
  return rest
