"""Google Tunix's own sampler, in JAX; see launch/bench/protocol.py."""

import importlib.metadata
import os
import pathlib
import sys

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from launch.bench import protocol

_INITIAL_SCALE = 0.02  # its own initial weights are zero in places


class Numbers:
  """The tokenizer the sampler asks for: a text is its token ids."""

  def encode(self, text, **kwargs):
    return [int(token) for token in text.split()]

  def decode(self, ids, **kwargs):
    return " ".join(str(int(token)) for token in ids)

  def bos_id(self):
    return None

  def eos_id(self):
    return 0

  def pad_id(self):
    return 0


def start(task):
  if task.workload.lengths:
    sys.exit("error: responses end where one token is drawn: use --ends")
  import jax
  import jax.numpy as jnp
  import numpy as np
  from tunix.generate import sampler

  shape, workload = task.workload.model, task.workload
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp")
  )
  model = jax.block_until_ready(model_of(shape, jnp.dtype(task.dtype), mesh))
  task.idle()
  cache = sampler.CacheConfig(
    cache_size=workload.prompt + workload.new + 1,
    num_layers=shape.layers,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_size,
  )
  sample = sampler.Sampler(model, Numbers(), cache)
  texts = [
    text for p in task.prompts for text in [" ".join(map(str, p))] * task.n
  ]
  # An id that is never drawn where nothing ends.
  stops = list(workload.stop_ids) or [shape.vocab + 1]

  def run(seed):
    with mesh:
      out = sample(
        texts,
        max_generation_steps=workload.new,
        max_prompt_length=workload.prompt,
        temperature=1.0,
        top_p=1.0,  # None would be greedy
        seed=seed,
        eos_tokens=stops,
      )
    # It leaves out the token that ended a response.
    return [
      [*row, stops[0]] if len(row) < workload.new else row for row in out.tokens
    ]

  names = ("jax", "jaxlib", "flax", "numpy")
  versions = {name: importlib.metadata.version(name) for name in names}
  return f"tunix {importlib.metadata.version('google-tunix')}", versions, run


def model_of(shape, dtype, mesh):
  import jax
  from flax import nnx
  from tunix.models.qwen2 import model as qwen2

  config = qwen2.ModelConfig(
    num_layers=shape.layers,
    vocab_size=shape.vocab,
    embed_dim=shape.width,
    hidden_dim=shape.mlp,
    num_heads=shape.heads,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_size,
    norm_eps=shape.norm_eps,
    rope_theta=int(shape.rope_theta),
    use_tied_embedding=shape.tied,
    dtype=dtype,
    param_dtype=dtype,
  )
  with mesh:
    graph, state = nnx.split(qwen2.Qwen2(config, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
      # Vectors are the scales of norms, which are ones, and biases.
      leaf
      if leaf.ndim == 1
      else (_INITIAL_SCALE * jax.random.normal(key, leaf.shape)).astype(dtype)
      for key, leaf in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, drawn))


if __name__ == "__main__":
  protocol.main(start)
