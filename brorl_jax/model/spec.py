"""The architecture of a decoder: its shapes and constants."""

import dataclasses

from jax.sharding import Mesh

from brorl_jax.model import attention
from brorl_jax.model.target import Target, here


@dataclasses.dataclass(frozen=True)
class PolicySpec:
  """Shapes and constants of a decoder; hashable, so jit may close over it."""

  vocab: int  # V, rows of the embedding
  width: int  # D
  layers: int  # L
  heads: int  # H
  kv_heads: int  # G, divides H
  head_size: int  # K, even
  mlp: int  # F, of an expert if there are experts
  rope: attention.Rope
  norm_eps: float
  tied: bool  # the head is the embedding, transposed
  dtype: str = "float32"  # of activations and caches; logits are float32
  max_positions: int = 32768  # of prompt and response together
  int8_cache: bool = False  # keys and values of responses, when sampling
  # What the backward pass recomputes: "layer" keeps only a layer's input,
  # "products" also its matrix products, "nothing" keeps everything.
  remat: str = "layer"
  # The mesh over whose axis "fsdp" parameters are sharded; `response_logp` and
  # `packed_logp` gather them layer by layer. None if every row of devices has
  # all of them.
  mesh: Mesh | None = None
  # For which programs are compiled.
  target: Target = dataclasses.field(default_factory=here, repr=False)
  # The config.json that it was read from, so that it can be written back.
  origin: str = dataclasses.field(default="", compare=False, repr=False)

  # Attention.
  qkv_bias: bool = False
  output_bias: bool = False
  qk_norm: bool = False  # RMSNorm of every head's query and key
  query_scale: float | None = None  # of the scores; K^-1/2 if None
  attention_softcap: float = 0.0  # of the scores; 0: none
  window: int = 0  # positions that a sliding layer sees, its own included
  sliding: tuple[bool, ...] = ()  # per layer; empty if none slides
  sliding_rope: attention.Rope | None = None  # of sliding layers, if another

  # Feed-forward.
  mlp_bias: bool = False
  activation: str = "silu"  # or "gelu_tanh"
  experts: int = 0  # E; 0: one feed-forward for all tokens
  experts_per_token: int = 0
  normalize_experts: bool = False  # shares of the chosen ones add up to 1

  # Around them.
  embed_scale: float = 1.0
  norm_offset: float = 0.0  # added to the scale of every norm
  post_norms: bool = False  # norms behind attention and feed-forward too
  final_softcap: float = 0.0  # of the logits; 0: none

  @property
  def attention_scale(self) -> float:
    """The factor of attention scores."""
    return self.query_scale or self.head_size**-0.5
