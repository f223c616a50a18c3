"""What the embedded policies are, and what they are shown.

`steps`, 25 minutes, 2,570 CPU-seconds (2 cores of an AMD EPYC, jax 0.10.2,
2026-11-26): after the right demonstrations held-out pass@1 is .573, after those
of mixed quality .236 (12 tasks, temperature .6). So a run of n512.py can learn
again what the policy did before, and learn it from verdicts.

`at_once`, 10 to 15 minutes: .625, then .229 (8 tasks, temperature 1).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from brorl_jax.configs import base
from brorl_jax.configs.dials import DIALS
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.verdicts.base import Family
from launch.embedded.demonstrations import Respond, answers, solutions
from launch.embedded.supervised import PairLayout


class Stage(NamedTuple):
  """Supervised training on one mix of demonstrations.

  Attributes:
    updates: Their number.
    lr: Peak learning rate; falls to 0 as a cosine.
    respond: Makes the demonstrations.
  """

  updates: int
  lr: float
  respond: Respond


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """An embedded policy.

  Attributes:
    families: Whose puzzles are demonstrated.
    puzzles: Their number per family.
    prompt_tokens: Most of a prompt.
    max_new_tokens: Most of a response, its end included.
    whole: Texts that are one token each.
    merges: Of a first BPE, which finds the sentences that questions share; each
      becomes one of the policy's ids.
    policy: Its sizes.
    layout: Rows of an update; several demonstrations share a row.
    stages: Right demonstrations first, then some of mixed quality: without
      wrong ones RL would have nothing to improve.
  """

  families: Sequence[Family]
  puzzles: int
  prompt_tokens: int
  max_new_tokens: int
  whole: Sequence[str] = ()
  merges: int
  policy: Policy
  layout: PairLayout
  stages: Sequence[Stage]


# Sequences are short, so the base of the rotary angles is small.
_AT_ONCE = Policy(
  vocab=512,
  width=96,
  layers=3,
  heads=4,
  kv_heads=2,
  head_size=24,
  mlp=384,
  rope=Rope(100.0),
  norm_eps=1e-6,
  tied=True,
  qkv_bias=True,
)

RECIPES: Mapping[str, Recipe] = {
  "steps": Recipe(
    families=[Family(name, DIALS[name][0]) for name in sorted(DIALS)],
    puzzles=10_000,
    prompt_tokens=120,
    max_new_tokens=176,
    whole=("<answer>", "</answer>"),
    merges=6000,
    policy=dataclasses.replace(
      _AT_ONCE, width=128, head_size=32, mlp=256, rope=Rope(1000.0)
    ),
    # About 90 demonstrations. 14 microbatches are 1.7 times as fast as one:
    # activations stay in the caches.
    layout=PairLayout(tokens=320, rows=2, microbatches=14),
    stages=(
      Stage(
        2400,
        3e-3,
        solutions({"careful": 0.6, "detour": 0.2, "direct": 0.2}),
      ),
      Stage(
        300,
        1e-3,
        solutions(
          {"careful": 0.1, "detour": 0.1, "direct": 0.1, "sloppy": 0.7}
        ),
      ),
    ),
  ),
  "at_once": Recipe(
    families=[
      Family(name, settings) for name, settings in sorted(base.FAMILIES.items())
    ],
    puzzles=20_000,
    prompt_tokens=40,
    max_new_tokens=6,
    merges=700,
    policy=_AT_ONCE,
    # About 128 demonstrations.
    layout=PairLayout(tokens=128, rows=14, microbatches=1),
    stages=(
      Stage(3000, 3e-3, answers({})),
      Stage(
        420,
        1e-3,
        answers(
          {
            "letter_counting": 0.5,
            "count_primes": 0.5,
            "leg_counting": 0.5,
            "gcd": 0.5,
            "basic_arithmetic": 0.5,
            "number_sequence": 0.5,
            "spell_backward": 0.12,
            "simple_equations": 0.2,
          }
        ),
      ),
    ),
  ),
}
