"""From verdicts to updates: reward, advantage, loss, reference, optimizer."""

import dataclasses
from typing import Literal

from brorl_jax.config import section
from brorl_jax.config.section import Section, phased, setting, stated, usual


@dataclasses.dataclass(frozen=True)
class Reward(Section):
  """Verifiers and their limits, and rewards for the length of a response.

  A cosine reward is highest for an empty right response and falls to the limit,
  max_new_tokens. What is right is told by the raw reward: 1 or more.
  """

  verifier: tuple[str, ...] = setting(
    (),
    "Your own reward functions, or an environment: 'file.py:function' or "
    "'package.module:function', see brorl_jax/verdicts/README.md. They score "
    "all lines of data.files; the results of several are added. (): the "
    "verifier of each domain.",
  )
  timeout_s: float = setting(
    60.0,
    "Time limit of one call of these functions, which may wait for a network.",
    unit="seconds",
  )
  code_s: tuple[float, ...] = setting(
    (5.0, 30.0),
    "Time limits of a program: per test, if its example has no time_limit, and "
    "for all tests. Sleep counts, waiting for a CPU does not.",
    unit="CPU-seconds",
  )
  allow_inner: bool = setting(
    False,
    "Run programs even if bubblewrap is missing or may not create namespaces. "
    "Programs then see which files exist; threads and files fail.",
  )
  truncated_factor: float = usual(
    1.0,
    "Factor on the reward of a truncated response; 1: unchanged. The ProRL v2 "
    "script of the authors and the presets of language models have 0.1.",
  )
  mask_truncated: bool = phased(
    False, "Exclude truncated responses from baseline and loss."
  )
  length: Literal["", "cosine", "replace", "overlong"] = usual(
    "",
    "'cosine' is added to right responses; 'replace' is paid in place of the "
    "reward, a partial score is wrong then (ProRL v2, authors' script); "
    "'overlong', DAPO's, is added to all; '': none. BroRL does not say.",
  )
  length_range: tuple[float, ...] = usual(
    (-0.5, 0.0),
    "Lowest and highest of these. 'cosine': at max_new_tokens, and of an empty "
    "response. 'replace': of an empty wrong and an empty right one; at the "
    "limit they are 0 and 0.5. 'overlong': DAPO has (-1, 0).",
  )
  length_steps: tuple[int, ...] = stated(
    (100, 500),
    "Steps with and without a cosine ('cosine', 'replace') and the penalty on "
    "repetition, in turn (ProRL v2); (1, 0): always with them.",
    unit="steps",
  )
  length_buffer: int = phased(
    2,
    "Tokens over which 'overlong' falls; DAPO has 4,096 of 20,480.",
    unit="tokens",
  )
  repeat_penalty: tuple[float, ...] = usual(
    (0.0, 40),
    "Subtracted for each token that ends an n-gram which the response had "
    "before, 0: off; and the n-gram's tokens. The authors' script of ProRL v2 "
    "has 0.001; the source of its reward, arXiv 2502.03373, 40.",
    unit="per token, tokens",
  )

  def rules(self) -> section.Rules:
    good = all(isinstance(v, str) and ":" in v for v in self.verifier)
    must = "functions such as ('mine.py:score', 'package.module:score')"
    yield "verifier", good, must
    good = len({*self.verifier}) == len(self.verifier)
    yield "verifier", good, "different functions"
    yield from self.positive("timeout_s")
    limits = self.code_s
    good = len(limits) == 2 and not any(
      section.of_kind(x, float) for x in limits
    )
    good = good and 0.0 < limits[0] <= limits[1]
    yield "code_s", good, "two positive numbers, the second at least the first"
    good = 0.0 <= self.truncated_factor <= 1.0
    yield "truncated_factor", good, "between 0 and 1"
    ends = self.length_range
    good = len(ends) == 2 and not any(section.of_kind(x, float) for x in ends)
    # Beyond: the squares of rewards are summed in float32.
    good = good and -1e6 <= ends[0] <= ends[1] <= 1e6
    yield "length_range", good, "two ascending numbers of at most 1e6 in size"
    yield from self.at_least(1, "length_buffer")
    given = self.repeat_penalty
    good = len(given) == 2 and not section.of_kind(given[0], float)
    good = good and not section.of_kind(given[1], int) and given[1] >= 1
    good = good and 0.0 <= given[0] <= 1.0
    must = "(a number between 0 and 1, tokens of an n-gram) such as (0.001, 40)"
    yield "repeat_penalty", good, must
    steps = self.length_steps
    good = len(steps) == 2 and not any(section.of_kind(n, int) for n in steps)
    good = good and steps[0] >= 1 and steps[1] >= 0
    yield "length_steps", good, "two counts, the first at least 1"

  @property
  def scheduled(self) -> bool:
    """Whether something follows `length_steps`."""
    return self.length in ("cosine", "replace") or self.repeat_penalty[0] > 0.0


@dataclasses.dataclass(frozen=True)
class Advantage(Section):
  """Baseline and scale."""

  kind: str = stated(
    "tokens",
    "REINFORCE++-baseline, whitened over 'tokens' (released code) or "
    "'trajectories' (formula of the paper); 'grpo'; 'centered': reward - group "
    "mean; 'leave_one_out' (RLOO): - mean of the others; 'maxrl': (reward - "
    "mean) / mean; 'pass_at_k:4' (PKPO): one of 4 samples must be right. More "
    "than a quarter of n or rounds[0] leaves most groups without a gradient. "
    "Your own function, 'file.py:function', maps (reward, valid, length), each "
    "[P,N], to advantages [P,N].",
  )
  boost: float = phased(
    0.0,
    "Added to the advantage of right responses, those of a raw reward of at "
    "least 1, after whitening. The authors' script of ProRL v2 has 0.1.",
  )

  @property
  def k(self) -> int:
    """Samples of 'pass_at_k:K', of which one must be right; otherwise 0."""
    name, _, k = self.kind.partition(":")
    return int(k) if name == "pass_at_k" and k.isdecimal() else 0

  def rules(self) -> section.Rules:
    good = self.k >= 1 or self.kind.partition(":")[0] != "pass_at_k"
    yield "kind", good, "'pass_at_k:K' with a number, such as 'pass_at_k:4'"
    yield from self.at_least(0, "boost")


@dataclasses.dataclass(frozen=True)
class Loss(Section):
  """The surrogate loss, its clip, and the correction for the sampler."""

  kind: str = stated(
    "ppo",
    "'ppo' clips the ratio of each token; 'gspo' that of the sequence, with a "
    "clip of about 3e-4; 'cispo' the weight of each token's gradient, with "
    "clip_low = 1; 'reinforce' has no ratio. Your own function, "
    "'file.py:function', maps (logp [B,T], logp_old [B,T], advantage [B], mask "
    "[B,T], and clip_low, clip_high, dual_clip if it names them) to losses "
    "[B,T] or [B].",
  )
  mean: Literal["token", "sequence", "prompt", "constant"] = usual(
    "token",
    "What has equal weight: every 'token' (DAPO; with 'gspo' every sequence), "
    "'sequence' (GRPO) or 'prompt'. 'constant' divides sums over tokens by "
    "max_new_tokens (Dr. GRPO, with advantage.kind = 'centered'). KL and "
    "entropy are always means over tokens.",
  )
  clip_low: float = stated(
    0.2, "Lower end of the ratio is 1 - clip_low; 1: no lower end."
  )
  clip_high: float = stated(0.28, "Upper end of the ratio is 1 + clip_high.")
  dual_clip: float = phased(
    0.0,
    "With 'ppo': the loss of a token with a negative advantage A is at most "
    "dual_clip x |A|; 0: no bound. The authors' script of ProRL v2 has 10.",
  )
  entropy_weight: float = phased(
    0.0,
    "Weight of an entropy bonus. ProRL and BroRL have none.",
    unit="per nat",
  )
  correction: Literal["none", "truncated", "banded", "sequence"] = stated(
    "truncated",
    "How tokens are weighted by the ratio of trainer to sampler: 'truncated' "
    "(TIS), 'banded' (IcePop), 'sequence' (keeps or drops whole rollouts by "
    "the geometric mean of their ratios) or 'none'. BroRL has 'truncated'.",
  )
  correction_range: tuple[float, ...] = usual(
    (),
    "Smallest and largest ratio: 'truncated' lowers what is larger, the others "
    "drop what is outside. (): (0, 2) for 'truncated', (0.5, 5) for 'banded', "
    "(0.999, 1.002) for 'sequence'.",
  )

  def rules(self) -> section.Rules:
    good = 0.0 < self.clip_low <= 1.0
    yield "clip_low", good, "above 0 and at most 1; 1 is no lower end"
    yield from self.positive("clip_high")
    good = self.dual_clip > 1.0 or self.dual_clip == 0.0
    yield "dual_clip", good, "above 1, the ratio of no change; or 0, no bound"
    yield from self.at_least(0, "entropy_weight")
    ratios = self.correction_range
    good = len(ratios) in (0, 2) and not any(
      section.of_kind(x, float) for x in ratios
    )
    yield "correction_range", good, "two numbers, or ()"
    low, high = ratios or (0.0, 2.0)
    good = 0.0 <= low <= 1.0 <= high and low < high
    must = "a smallest ratio of 0 to 1 and a larger one of at least 1"
    yield "correction_range", good, must
    good = low == 0.0 or self.correction != "truncated"
    must = "(0, largest) with correction = 'truncated'"
    yield "correction_range", good, must


@dataclasses.dataclass(frozen=True)
class Reference(Section):
  """Weight of the KL term, and when the policy becomes the reference."""

  kl_weight: float = usual(
    1e-4,
    "Weight of the KL term (k2). If it is 0 in all phases, no reference is "
    "kept. Public recipes of ProRL v2 have 1e-4, the authors' script 5e-4, its "
    "port to NeMo-RL 3e-4.",
    unit="per nat",
  )
  reset_every: int = usual(
    300,
    "Steps after which the policy becomes the reference; 0: never. ProRL v2 "
    "has 200 to 500.",
    unit="steps",
  )
  reset_stalled: int = phased(
    0, "Reset after this many evaluations without a better score; 0: never."
  )
  reset_to: Literal["latest", "anew", "best"] = phased(
    "latest",
    "'latest': a reset makes the policy the reference. 'anew': moments and "
    "warm-up restart too (ProRL). 'best': both go back to the best held-out "
    "score of the run, which stays in a checkpoint (ProRL).",
  )

  def rules(self) -> section.Rules:
    yield from self.at_least(0, "kl_weight")
    yield from self.at_least(0, "reset_every", "reset_stalled", zero="never")


@dataclasses.dataclass(frozen=True)
class Optim(Section):
  """Minibatches and AdamW."""

  betas: tuple[float, ...] = setting(
    (0.9, 0.95), "Decay of the first and second moment.", source="unknown"
  )
  weight_decay: float = setting(
    0.0,
    "AdamW's weight decay: an update subtracts lr x this x the weight.",
    source="unknown",
  )
  max_grad_norm: float = setting(
    1.0, "Norm above which gradients are scaled down.", source="unknown"
  )
  minibatches: int = usual(
    2,
    "Optimizer updates per step, each on whole groups. Both runs of BroRL have "
    "the same number; ProRL has 4.",
  )
  rows: int = phased(
    32,
    "Most rows of a block: distinct rollouts of one prompt, and padding. 0: 8, "
    "or fewer, by memory and padding.",
  )
  blocks: int = phased(
    16,
    "Blocks per microbatch of the longest responses, a multiple of the rows of "
    "the mesh. 0: one for each row.",
  )
  lr: float = usual(
    3e-4, "Learning rate after the warm-up. BroRL does not state it."
  )
  lr_samples: int = stated(
    0,
    "Samples per step for which lr holds; the rate grows with the square root "
    "of sampling.samples / lr_samples (BroRL). 0: lr as it is.",
    unit="rollouts",
  )
  warmup: int = phased(
    5, "Updates at the start in which lr rises from 0.", unit="updates"
  )
  spike: float = phased(
    0.0,
    "Skip an update whose gradient norm is this many standard deviations above "
    "the mean of the last 128, and twice that mean; 0: off. 6 is common.",
    unit="standard deviations",
  )

  def rules(self) -> section.Rules:
    some = [
      x for x in self.betas if not section.of_kind(x, float) and 0.0 <= x < 1.0
    ]
    good = len(some) == len(self.betas) == 2
    yield "betas", good, "two numbers of at least 0 and below 1"
    yield from self.at_least(1, "minibatches")
    follows = "it follows from the devices"
    yield from self.at_least(0, "rows", "blocks", zero=follows)
    yield from self.positive("lr", "max_grad_norm")
    yield from self.at_least(0, "warmup", "lr_samples", "weight_decay")
    yield from self.at_least(0, "spike", zero="off")
