"""Sizes of a run: the embedded policy, or a language model of the hub.

Not an experiment: n512.py:1p5b and n16.py:8b take them by name. N and samples
stay those of the config. Of the values that the paper does not state each says
so.
"""

from typing import Any

import ml_collections

NAMES = ("tiny", "1p5b", "8b")


def apply(c: ml_collections.ConfigDict, name: str) -> None:
  """Changes the fields that depend on the size of the policy."""
  if name not in NAMES:
    raise ValueError(
      f"there is no preset {name!r}; there are {', '.join(NAMES)}"
    )
  if name != "tiny":
    _language_model(c)
  elif c.n in (4, 8, 16, 32):
    # 7 of 16 rollouts differ, of 512 some 40: a third of the time of an update.
    c.rows, c.blocks = 8, 64
  if name == "1p5b":
    # Where BroRL's lineage begins; the paper goes on from step 3,000 of
    # ProRL v2, nvidia/Nemotron-Research-Reasoning-Qwen-1.5B, revision v2.
    c.checkpoint = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
  if name == "8b":
    c.checkpoint = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    c.mesh_model = 8  # a node


def _language_model(c: Any) -> None:
  # BroRL's own runs have 191 steps with N = 512 (419 in a later note) and 535
  # with N = 16: as many as two resets of the reference need.
  c.steps = 420
  # Stated for ProRL v2: every 200 to 500 steps. Unknown for BroRL; the least of
  # these, or a run of its length would never be reset.
  c.reset_every = 200
  c.in_flight = 32 * 512
  c.slots = 0  # as many as fit; responses are long
  c.prompt_tokens = 1024
  c.max_new_tokens = 15360  # stated: a context window of 16,384
  c.domains.gym.instruction = (
    "Think step by step, then write the final answer alone between <answer> "
    "and </answer>."
  )
  c.families = _families()
  # Unknown, only that both arms have the same. ProRL's own 4, which leave 32
  # prompts for an update of 128 x 512; a public script makes 8 of 512 x 16.
  c.minibatches = 4
  c.rows = 8
  c.blocks = 8
  # Stated: the rate grows with the root of the samples, so that 128 x 512 has
  # 2.83 times that of 512 x 16. Which rate that is is unknown: 1e-6 in public
  # scripts.
  c.lr = 1e-6
  c.lr_scaling = "samples"
  c.lr_base = 512 * 16
  c.warmup = 10  # unknown
  # Unknown for BroRL; both released recipes of ProRL v2 pay nothing for a
  # response that was cut, whatever it says.
  c.truncated_factor = 0.0
  c.overlong_buffer = 4096  # DAPO's, if overlong_weight is set
  c.dtype = "bfloat16"
  c.eval_every = 20
  c.eval_prompts = 20
  c.save_every = 5


def _families() -> ml_collections.ConfigDict:
  """Reasoning-gym tasks at their own default difficulty."""
  c = ml_collections.ConfigDict()
  for name in """
    base_conversion basic_arithmetic chain_sum count_primes course_schedule
    family_relationships fraction_simplification gcd knights_knaves
    largest_island lcm letter_counting maze mini_sudoku number_filtering
    products rotate_matrix self_reference shortest_path simple_equations
    spell_backward string_synthesis syllogism word_sorting
  """.split():
    c[name] = {"weight": 1.0, "settings": {}}
  return c
