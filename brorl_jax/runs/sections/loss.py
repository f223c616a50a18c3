"""The policy loss; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.runs.sections.section import Rule, Section, setting


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
    "[B] in jax.numpy. It receives those of the options clip_low, clip_high "
    "and dual_clip that it names.",
    source="stated",
    phased=True,
  )
  mean: Literal["token", "sequence", "prompt", "constant"] = setting(
    "token",
    "What has equal weight in the mean: every 'token' (DAPO; with 'gspo' every "
    "sequence), every 'sequence' (GRPO), or every 'prompt'. 'constant' divides "
    "the sum over tokens by the same length for all sequences (Dr. GRPO). KL "
    "and entropy are always means over tokens.",
    source="unknown",
    phased=True,
  )
  constant: int = setting(
    0,
    "Length for mean = 'constant'; 0: sampling.max_new_tokens.",
    unit="tokens",
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
  dual_clip: float = setting(
    0.0,
    "Upper bound on the loss of a token with negative advantage, as a multiple "
    "of |advantage|; 0: no bound. 3 is common; the released ProRL v2 scripts "
    "have none.",
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
  correction_cap: float = setting(
    2.0,
    "Largest weight of 'truncated'; 2 is common.",
    source="unknown",
    phased=True,
  )
  correction_low: float = setting(
    0.5, "Smallest ratio of 'banded'; released scripts have 0.5.", phased=True
  )
  correction_high: float = setting(
    5.0, "Largest ratio of 'banded'; released scripts have 5.", phased=True
  )
  sequence_low: float = setting(
    0.999,
    "Smallest mean ratio of 'sequence', as in released scripts.",
    phased=True,
  )
  sequence_high: float = setting(
    1.002,
    "Largest mean ratio of 'sequence', as in released scripts.",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(0, "constant")
    good = 0.0 < self.clip_low <= 1.0
    yield "clip_low", good, "above 0 and at most 1 (no bound)"
    yield "clip_high", self.clip_high > 0.0, "positive"
    good = self.dual_clip == 0.0 or self.dual_clip > 1.0
    yield "dual_clip", good, "above 1, or 0: no bound"
    yield "entropy_weight", self.entropy_weight >= 0.0, "0 or positive"
    yield "correction_cap", self.correction_cap >= 1.0, "at least 1"
    for low, high in (
      ("correction_low", "correction_high"),
      ("sequence_low", "sequence_high"),
    ):
      least, most = getattr(self, low), getattr(self, high)
      yield low, 0.0 <= least <= 1.0, "between 0 and 1"
      yield high, most >= 1.0, "at least 1"
      yield low, least < most, f"below {high} = {most}"
