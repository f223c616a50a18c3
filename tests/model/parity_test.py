"""Every architecture against transformers on torch: logits, decoding, files.

torch is a development dependency on Python 3.11 only; elsewhere these are
skipped.
"""

import functools
import json
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_policies import response_logits

from brorl_jax.model import huggingface
from brorl_jax.rollout import sampler

torch = pytest.importorskip("torch")
import transformers

torch.set_num_threads(1)  # two workers share the cores

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=160,
  num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
  max_position_embeddings=512, rms_norm_eps=1e-5, pad_token_id=0,
  bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)  # fmt: skip
ROPE = dict(SIZES, rope_theta=1e4)
WIDE = dict(ROPE, head_dim=24)  # a head is not width / heads
MOE = dict(WIDE, moe_intermediate_size=40, norm_topk_prob=True)
GEMMA = dict(head_dim=24, sliding_window=6, query_pre_attn_scalar=30,
  tie_word_embeddings=True)  # fmt: skip
scaled = lambda kind, **rope: dict(
  ROPE, rope_scaling=dict(rope_type=kind, factor=4.0, **rope)
)
TRAINED = dict(original_max_position_embeddings=64)
KINDS = {
  "qwen2": ("qwen2", ROPE),
  "qwen2, tied, upper layers slide": ("qwen2",
    dict(ROPE, tie_word_embeddings=True, use_sliding_window=True,
      sliding_window=7, max_window_layers=1)),
  "qwen3": ("qwen3", WIDE),
  "qwen3, tied, biased": ("qwen3",
    dict(WIDE, attention_bias=True, tie_word_embeddings=True)),
  "qwen3 moe": ("qwen3_moe", dict(MOE, num_experts=8, num_experts_per_tok=3)),
  "qwen3 moe, shares as they are, slides": ("qwen3_moe",
    dict(MOE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
      use_sliding_window=True, sliding_window=9)),
  "llama": ("llama", ROPE),
  "llama, biased": ("llama", dict(ROPE, attention_bias=True, mlp_bias=True)),
  "llama 3 rope": ("llama",
    scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED)),
  "linear rope": ("llama", scaled("linear")),
  "dynamic rope": ("llama", scaled("dynamic")),
  "yarn": ("qwen2", scaled("yarn", **TRAINED)),
  "yarn, every option": ("llama",
    scaled("yarn", beta_fast=16.0, beta_slow=2.0, attention_factor=1.3,
      truncate=False, **TRAINED)),
  "yarn as DeepSeek scales": ("llama",
    scaled("yarn", mscale=1.2, mscale_all_dim=0.7, **TRAINED)),
  "mistral": ("mistral", dict(ROPE, sliding_window=5)),
  "mistral, no window": ("mistral", dict(WIDE, sliding_window=None)),
  "gemma 2": ("gemma2", dict(ROPE, **GEMMA)),
  "gemma 3": ("gemma3_text",
    dict(SIZES, **GEMMA, sliding_window_pattern=2,
      rope_scaling=dict(rope_type="linear", factor=8.0))),
}  # fmt: skip
LENGTHS = (24, 17, 9)  # of three prompts, left-padded


class Theirs(NamedTuple):
  model: transformers.PreTrainedModel
  tokens: np.ndarray  # [3, 24]
  mask: np.ndarray

  def prompts(self) -> list[list[int]]:
    pairs = zip(self.tokens, self.mask, strict=True)
    return [row[keep].tolist() for row, keep in pairs]

  def logits(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    position = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
      out = self.model(torch.tensor(tokens),
        attention_mask=torch.tensor(mask.astype(np.int64)),
        position_ids=torch.tensor(position))  # fmt: skip
    return out.logits.numpy()


def random_model(name: str) -> Theirs:
  """No bias 0, no norm 1, and no logit that towers above the others."""
  torch.manual_seed(0)
  kind, fields = KINDS[name]
  config = transformers.AutoConfig.for_model(kind, **fields)
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  )
  model = model.eval().float()
  with torch.no_grad():
    for path, p in model.named_parameters():
      by = 0.3 if "norm" in path or path.endswith("bias") else 0.2
      p.add_(by * torch.randn_like(p))
      # A tied policy with large embeddings says the last token again.
      if "embed" in path and kind.startswith("gemma"):
        p.mul_(0.05)
  tokens = np.random.default_rng(0).integers(1, 96, (3, 24))
  return Theirs(model, tokens, np.arange(24) >= 24 - np.array(LENGTHS)[:, None])


@pytest.mark.parametrize("name", tiers.some(KINDS, 1, 1))
def test_policy_is_transformers_in_every_form(tmp_path, name):
  theirs = random_model(name)
  theirs.model.save_pretrained(tmp_path / "theirs", max_shard_size="150KB")
  assert (tmp_path / "theirs/model.safetensors.index.json").exists()
  policy, params = huggingface.load(tmp_path / "theirs")

  # All positions at once, left-padded.
  want = theirs.logits(theirs.tokens, theirs.mask)
  scale = np.abs(want[theirs.mask]).max()
  got = jax.jit(policy.logits)(
    params, jnp.asarray(theirs.tokens), jnp.asarray(theirs.mask)
  )
  gap = np.abs(got - want)[theirs.mask].max()
  print(f"{name}: logits differ by {gap:.1e} of {scale:.1f}")
  assert gap <= 1e-5 * scale

  # Prefill, shared prefix, cached decode; slots that start again.
  prompts = theirs.prompts()
  stop = (7, 11, 13)
  out = sampler.sample(policy, params, prompts, jax.random.key(0), n=5, slots=2,
    max_new_tokens=24, stop_ids=stop)  # fmt: skip
  out = jax.device_get(out)
  assert out.mask.sum(axis=2).min() < 24 == out.mask.sum(axis=2).max()
  for p, prompt in enumerate(prompts):
    joined = np.concatenate([np.tile(prompt, (5, 1)), out.tokens[p]], axis=1)
    every = theirs.logits(joined, np.ones(joined.shape, bool))
    logp = torch.log_softmax(torch.tensor(every), dim=-1).numpy()
    logp = logp[:, len(prompt) - 1 : -1]
    logp = np.take_along_axis(logp, out.tokens[p][..., None], axis=2)[..., 0]
    assert np.abs(logp - out.logp[p])[out.mask[p]].max() <= 1e-5 * scale

  # What the update differentiates.
  trained = jax.jit(functools.partial(response_logits, policy))(
    params, jnp.asarray(theirs.tokens), jnp.asarray(theirs.mask), out.tokens
  )
  joined = np.concatenate([theirs.tokens, out.tokens[:, 0]], axis=1)
  seen = np.concatenate([theirs.mask, out.mask[:, 0]], axis=1)
  want = theirs.logits(joined, seen)[:, 23:-1]
  assert np.abs(trained[:, 0] - want)[out.mask[:, 0]].max() <= 1e-5 * scale


@pytest.mark.parametrize("name", tiers.some(KINDS, 1, 2))
@pytest.mark.parametrize("dtype", [tiers.at_night("float32"), "bfloat16"])
def test_what_we_write_transformers_reads_bit_for_bit(tmp_path, name, dtype):
  theirs = random_model(name)
  model = theirs.model.to(getattr(torch, dtype))
  model.save_pretrained(tmp_path / "theirs")
  policy, params = huggingface.load(tmp_path / "theirs")
  huggingface.save(
    tmp_path / "ours", policy, params, dtype=dtype, shard_bytes=150_000
  )
  back = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "ours", dtype="auto"
  )
  assert back.dtype == getattr(torch, dtype)
  original = dict(model.named_parameters())
  for path, value in back.named_parameters():
    assert torch.equal(value, original.pop(path)), path
  assert not original
  again, same = huggingface.load(tmp_path / "ours")
  assert again == policy
  chex.assert_trees_all_equal(same, params)
  fields = json.loads((tmp_path / "ours" / "config.json").read_text())
  assert fields.get("num_experts", 0) == policy.experts  # as transformers 4
  # The config says the same model too.
  if dtype == "float32":
    want = theirs.logits(theirs.tokens, theirs.mask)[theirs.mask]
    got = theirs._replace(model=back.eval()).logits(theirs.tokens, theirs.mask)
    np.testing.assert_allclose(got[theirs.mask], want, atol=1e-4)
