"""A decoder written with loops in numpy; no test file."""

import jax
import numpy as np


def logits(policy, params, ids):
  """The decoder in float64, one head and one pair of numbers at a time."""
  c, ids = policy, np.asarray(ids)
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  scale = c.query_scale or c.head_size**-0.5
  cap = lambda x, most: most * np.tanh(x / most) if most else x

  def norm(x, scale):
    square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(square + c.norm_eps) * (c.norm_offset + scale)

  def turned(x, rope):
    """x [T,K], each pair a complex number that turns."""
    pairs = x[:, : c.head_size // 2] + 1j * x[:, c.head_size // 2 :]
    for t in range(len(pairs)):
      for i in range(pairs.shape[1]):
        speed = rope.theta ** (-2 * i / c.head_size) / rope.factor
        pairs[t, i] *= rope.scale * np.exp(1j * t * speed)
    return np.concatenate([pairs.real, pairs.imag], axis=1)

  def product(b, name, h):
    return h @ b[name]["kernel"] + b[name].get("bias", 0.0)

  def head_of(b, name, index, h):
    bias = b[name]["bias"][index] if c.qkv_bias else 0.0
    y = h @ b[name]["kernel"][:, index] + bias
    return norm(y, b[f"ln_{name}"]["scale"]) if c.qk_norm and name != "v" else y

  def act(x):
    if c.activation == "silu":
      return x / (1 + np.exp(-x))
    cube = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(cube))

  def feed_forward(b, h):
    if not c.experts:
      return product(
        b, "down", act(product(b, "gate", h)) * product(b, "up", h)
      )
    out = np.zeros_like(h)
    for t in range(len(h)):
      share = np.exp(h[t] @ b["router"]["kernel"])
      share /= share.sum()
      chosen = np.argsort(-share)[: c.experts_per_token]
      total = share[chosen].sum() if c.normalize_experts else 1.0
      for e in chosen:
        gate, up, down = (
          b[f"expert_{name}"]["kernel"][e] for name in ("gate", "up", "down")
        )
        out[t] += share[e] / total * (act(h[t] @ gate) * (h[t] @ up)) @ down
    return out

  x = w["embed"]["embedding"][ids] * c.embed_scale
  for layer in range(c.layers):
    b = jax.tree.map(lambda a: a[layer], w["blocks"])
    slides = bool(c.sliding) and c.sliding[layer]
    rope = (c.sliding_rope or c.rope) if slides else c.rope
    h = norm(x, b["ln_attn"]["scale"])
    total = np.zeros_like(x)
    for head in range(c.heads):
      group = head // (c.heads // c.kv_heads)
      q = turned(head_of(b, "q", head, h), rope)
      k = turned(head_of(b, "k", group, h), rope)
      v = head_of(b, "v", group, h)
      for t in range(len(ids)):
        seen = slice(max(0, t - c.window + 1) if slides else 0, t + 1)
        score = np.exp(cap(k[seen] @ q[t] * scale, c.attention_softcap))
        out = (score / score.sum()) @ v[seen]
        total[t] += out @ b["o"]["kernel"][head]
    total += b["o"].get("bias", 0.0)
    x = x + (norm(total, b["ln_attn_out"]["scale"]) if c.post_norms else total)
    y = feed_forward(b, norm(x, b["ln_mlp"]["scale"]))
    x = x + (norm(y, b["ln_mlp_out"]["scale"]) if c.post_norms else y)
  x = norm(x, w["ln_final"]["scale"])
  head = w["embed"]["embedding"].T if c.tied else w["head"]["kernel"]
  return cap(x @ head, c.final_softcap)
