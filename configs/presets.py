"""Policies for a run: one of the embedded ones, or a language model of the hub.

  hard    an embedded policy on 128 prompts, each with an answer of its own that
          it gives once in 30 to 1,000 times
  steps   the embedded policy that writes its steps, on puzzles that need them
  tiny    the embedded policy that answers at once; all defaults of base.py
  smollm2 a language model of 135 million parameters on arithmetic, for a laptop
  1p5b, 8b

Not an experiment: n512.py:1p5b and n16.py:8b name a preset. A preset does not
change N; `hard`, `steps` and `smollm2` change the samples of the config.

Comments say where a value of a language model is from:

  stated            in the papers: BroRL, ProRL, or the text on ProRL v2
  authors' script   a public launch script of ProRL v2, before BroRL; that it is
                    the authors' is inferred from the names in its paths
  port              ProRL v2 in NeMo-RL, by others
  unknown           in none of them
"""

import pathlib
from typing import Any

import ml_collections

from brorl_jax import config
from brorl_jax.configs.dials import DIALS
from brorl_jax.verdicts.base import MADE

ASSETS = pathlib.Path(config.__file__).parents[1] / "assets"
HARD, ARITHMETIC = ASSETS / "hard", ASSETS / "arithmetic"
NAMES = ("hard", "steps", "tiny", "smollm2", "1p5b", "8b")
PRORL_STARTS_FROM = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"  # stated
# Thousands of prompts in each of the paper's five sets, stated: 29, 18, 18, 27
# and 7 %. How they are mixed is unknown.
SIZES = {"math": 40, "code": 24, "stem": 25, MADE: 37, "instructions": 10}
_BY_LUCK = ("base_conversion", "path_star")  # tasks too hard for `steps`
_FEWER = 16  # times: responses of the preset `steps` are that much longer


def apply(c: Any, name: str) -> None:
  """Changes the fields that depend on the size of the policy."""
  if name not in NAMES:
    raise ValueError(
      f"preset {name!r} does not exist; choose {', '.join(NAMES)}"
    )
  if name == "hard":
    _hard(c)
  elif name == "steps":
    _steps(c)
  elif name == "smollm2":
    _smollm2(c)
  elif name != "tiny":
    _language_model(c)
  if name == "1p5b":
    # Stated: step 3,000 of ProRL v2, which began with PRORL_STARTS_FROM.
    c.policy.checkpoint = "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B@v2"
  if name == "8b":
    c.policy.checkpoint = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    c.devices.mesh_tensor = 4  # half a node of GPUs, one host of a TPU


def _hard(c: Any) -> None:
  c.policy.checkpoint = "embedded:hard"
  c.data.files = (str(HARD / "hard.jsonl"),)
  c.data.heldout_files = (str(HARD / "heldout.jsonl"),)
  c.reward.verifier = ("brorl_jax.configs.match:score",)
  c.data.prompt_tokens, c.sampling.max_new_tokens = 10, 4
  c.sampling.samples = 16 * 512 if c.sampling.rounds else 2048
  # Weighs by counts: the rarer right answers are, the more each one counts.
  c.advantage.kind = "maxrl"
  # Every group is trained on, in one update and without a KL term: what differs
  # between values of N is N, and the rate, tuned for each by factors of 2.
  c.filter.keep = "all"
  c.optim.lr = 2.0 ** (-11.5 if c.sampling.n == 16 else -11)
  c.run.steps = 350 if c.sampling.n == 16 else 1200
  if c.sampling.rounds:  # of at most 8,192 rollouts a step takes some 900
    c.optim.lr, c.run.steps = 2.0**-10, 1050
  c.optim.minibatches = 1
  c.optim.warmup = 2
  c.reference.kl_weight = 0.0
  c.sampling.in_flight = 0
  c.theory.prompts = 0
  # Measures what is trained: pass@1 at temperature 1.
  c.eval.temperature, c.eval.top_p, c.eval.prompts = 1.0, 1.0, 128
  c.guard.entropy_low = 0.0  # one answer is right: it falls to .04 of the start
  c.eval.every = c.run.save_every = c.run.steps // 7
  c.run.keep_checkpoints = 100  # of 2 MB: probabilities are read from them


def _steps(c: Any) -> None:
  c.policy.checkpoint = "embedded:steps"
  families: Any = ml_collections.ConfigDict()
  # Of the puzzles that the warm-up saw, those that a short run can learn. Luck
  # is reinforced too, and sums and equations seem to suffer from it: with the
  # two tasks pass@1 gained .094, without them .154 (MaxRL, seed 0, 20 steps).
  for name, (settings, _) in DIALS.items():
    if name not in _BY_LUCK:
      families[name] = {"weight": 1.0, "settings": dict(settings)}
  families.chain_sum.settings.max_terms = 4
  families.countdown.settings.max_numbers = 3
  c.data.families = families
  c.data.prompt_tokens = 80  # of 12,800 prompts the longest has 68
  c.sampling.max_new_tokens = 160  # steps of right answers take at most 120
  c.sampling.samples //= _FEWER  # 8 prompts of n512.py, 32 of n16.py
  c.sampling.in_flight = 0
  # 128 rollouts decode together: .98 of the slots are busy, and what a layer
  # computes stays in a processor's caches. A lane has two prompts: with as many
  # slots as a prompt has rollouts .69 of them would be busy, not .92.
  c.sampling.slots = min(-(-c.sampling.n // 2), 128)
  c.sampling.lanes = 128 // c.sampling.slots
  # Two rows of trees at a time, which need no memory worth saving: a gradient
  # takes 18.5 CPU-s, with recomputed layers 22.5 (21.8 with "products").
  c.optim.rows, c.optim.blocks = 32, 0
  c.devices.remat = "nothing"
  # All prompts of a step in one update: with two, pass@1 was higher after 10
  # steps (.349 against .336) and lower after 20 (.351 against .371).
  c.optim.minibatches = 1
  c.optim.warmup = 2  # a run has 22 updates
  c.theory.prompts = 0
  c.eval.prompts = 20


def _smollm2(c: Any) -> None:
  c.policy.checkpoint = "HuggingFaceTB/SmolLM2-135M-Instruct"
  c.data.files = (str(ARITHMETIC / "train.jsonl"),)
  c.data.heldout_files = (str(ARITHMETIC / "heldout.jsonl"),)
  c.reward.verifier = ("brorl_jax.configs.arithmetic:score",)
  c.data.prompt_tokens, c.sampling.max_new_tokens = 80, 12
  # 8 prompts x 512, by need 12: 4 x 512 rose to pass@1 of .52 and fell to .45.
  c.sampling.samples = 8 * 512
  if c.sampling.rounds:  # with few of a prompt no two begin alike
    c.sampling.samples, c.sampling.rounds = 12 * 512, (64, 512)
  # Of sums .06 are right; at 1 .02.
  c.sampling.temperature = 0.6
  c.sampling.in_flight = 0
  c.sampling.slots = min(c.sampling.n, 128)
  c.sampling.lanes = 128 // c.sampling.slots
  c.advantage.kind = "maxrl"
  c.optim.lr = 2e-5
  c.optim.minibatches, c.optim.warmup = 1, 2
  # A microbatch reads 538 MB of weights, and of a prompt some 60 tokens.
  c.optim.rows, c.optim.blocks = 64, 0
  c.devices.remat = "nothing"
  c.reference.kl_weight, c.theory.prompts = 0.0, 0
  c.run.steps = 12
  c.eval.temperature, c.eval.top_p = 0.6, 1.0
  c.eval.prompts, c.eval.n, c.eval.every = 44, 8, 2
  c.run.save_every = 4
  c.run.keep_checkpoints = 2  # of 1.6 GB
  # One answer is right, and what is cut comes behind it.
  c.guard.entropy_low = c.guard.truncated = 0.0


def _language_model(c: Any) -> None:
  # BroRL's runs have 191 steps with N = 512 (419 in a later note) and 535 with
  # N = 16. 420 steps include two resets of the reference.
  c.run.steps = 420
  # Stated for ProRL v2: every 200 to 500 steps. Unknown for BroRL; the smallest
  # value, because a longer period would never reset a run of BroRL's length.
  c.reference.reset_every = 200
  # These follow from the devices: nothing that the paper states does.
  c.sampling.in_flight = c.optim.rows = c.optim.blocks = 0
  c.sampling.slots = 0  # as many as fit; responses are long
  # The mean is unknown. A step on 64 H100 takes .72 of its time with int8 keys
  # (simulated); weights of the loss correct for what they change.
  c.sampling.mean_tokens, c.sampling.int8_cache = 7000, True
  c.data.prompt_tokens = 1024
  c.sampling.max_new_tokens = 15360  # stated: a context window of 16,384
  c.data.domains[MADE].instruction = (
    "Think step by step, then write the final answer alone between <answer> "
    "and </answer>."
  )
  c.data.families = _families()
  for name, size in SIZES.items():
    c.data.domains[name].weight = float(size)
  # Stated: rewards of puzzles are continuous, those of code and instructions
  # too, which is their default.
  c.data.domains[MADE].reward = "score"
  c.reward.code_s = (5.0, 5.0)  # stated: 5 s for all tests of a program
  # Stated: both arms have the same number. Authors' script and port: 8 updates,
  # 16 prompts each of 128 x 512. ProRL states 4.
  c.optim.minibatches = 8
  # Stated: the rate grows with the square root of the samples, so 128 x 512 has
  # 2.83 times the rate of 512 x 16. Base rate: authors' script and port.
  c.optim.lr = 1e-6
  c.optim.lr_samples = 512 * 16
  c.optim.warmup = 10  # unknown
  # Authors' script and port. Two recipes of others pay 0.
  c.reward.truncated_factor = 0.1
  c.loss.dual_clip = 10.0  # authors' script and port
  c.reference.kl_weight = 5e-4  # authors' script; port: 3e-4
  c.advantage.boost = 0.1  # authors' script and port; from which score: unknown
  # As in DAPO; used if reward.length is 'overlong'. Which reward for the length
  # BroRL has, and when, is unknown: here none. prorl_v2.py has one.
  c.reward.length_buffer = 4096
  c.policy.dtype = "bfloat16"
  c.eval.every = 20
  c.eval.prompts = 20
  c.run.save_every = 5


def _families() -> Any:
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
