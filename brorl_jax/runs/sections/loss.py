"""The policy loss; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.runs.sections.section import Rule, Section, of_kind, setting


@dataclasses.dataclass(frozen=True)
class Loss(Section):
  """The surrogate loss, its clip, and the correction for the sampler.

  A correction weights tokens by the ratio of trainer to sampler: 'truncated'
  (TIS), 'banded' (IcePop), 'sequence' (keeps or drops whole rollouts by the
  geometric mean of their ratios), or 'none'.
  """

  kind: str = setting(
    "ppo",
    "'ppo' clips the ratio of each token. 'gspo' has one ratio per sequence; "
    "its clip is about 3e-4. 'cispo' clips the weight of each token's gradient "
    "and drops no token; its paper has clip_low = 1. 'reinforce' has no ratio "
    "and no clip. Your own function is 'file.py:function' or "
    "'package.module:function', from (logp [B,T], logp_old [B,T], advantage "
    "[B], mask [B,T], **options) to the loss of each token [B,T] or sequence "
    "[B] in jax.numpy. It receives those of the options clip_low and clip_high "
    "that it names.",
    source="stated",
    phased=True,
  )
  mean: Literal["token", "sequence", "prompt", "constant"] = setting(
    "token",
    "What has equal weight in the mean: every 'token' (DAPO; with 'gspo' every "
    "sequence), every 'sequence' (GRPO), or every 'prompt'. 'constant' divides "
    "the sum over tokens by sampling.max_new_tokens for all sequences (Dr. "
    "GRPO). KL and entropy are always means over tokens.",
    source="unknown",
    phased=True,
  )
  clip_low: float = setting(
    0.2,
    "Lower end of the ratio is 1 - clip_low; 1: no lower end.",
    source="stated",
    phased=True,
  )
  clip_high: float = setting(
    0.28,
    "Upper end of the ratio is 1 + clip_high.",
    source="stated",
    phased=True,
  )
  entropy_weight: float = setting(
    0.0,
    "Weight of an entropy bonus. ProRL and BroRL have none.",
    unit="per nat",
    phased=True,
  )
  correction: Literal["none", "truncated", "banded", "sequence"] = setting(
    "truncated",
    "How tokens are weighted by the ratio of trainer to sampler: 'truncated' "
    "(TIS), 'banded' (IcePop), 'sequence' (keeps or drops whole rollouts by "
    "the geometric mean of their ratios) or 'none'. BroRL has 'truncated'.",
    source="stated",
    phased=True,
  )
  correction_range: tuple[float, ...] = setting(
    (),
    "Smallest and largest ratio: 'truncated' lowers what is larger, the others "
    "drop what is outside. (): the usual ones, (0, 2) for 'truncated', and "
    "those of released scripts, (0.5, 5) for 'banded' and (0.999, 1.002) for "
    "'sequence'.",
    source="unknown",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    good = 0.0 < self.clip_low <= 1.0
    yield "clip_low", good, "above 0 and at most 1 (no bound)"
    yield "clip_high", self.clip_high > 0.0, "positive"
    yield "entropy_weight", self.entropy_weight >= 0.0, "0 or positive"
    ratios = self.correction_range
    good = len(ratios) in (0, 2) and not any(of_kind(x, float) for x in ratios)
    yield "correction_range", good, "two numbers, or ()"
    low, high = ratios or (0.0, 2.0)
    good = 0.0 <= low <= 1.0 <= high and low < high
    must = "a smallest ratio of 0 to 1 and a larger one of at least 1"
    yield "correction_range", good, must
    good = low == 0.0 or self.correction != "truncated"
    must = "(0, largest) with correction = 'truncated'"
    yield "correction_range", good, must
