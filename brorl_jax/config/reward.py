"""Rewards; read by stages/scoring.py, stages/advantages.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.config.section import Rule, Section, of_kind, setting


@dataclasses.dataclass(frozen=True)
class Reward(Section):
  """Verifiers and their limits, and rewards for the length of a response.

  The cosine reward falls from length_max for an empty response to length_min at
  max_new_tokens. Only right responses get it.
  """

  verifier: tuple[str, ...] = setting(
    (),
    "Your own reward functions, 'file.py:function' or "
    "'package.module:function', of (response, example) or (responses, example, "
    "step); see brorl_jax/verdicts/own. They score every line of data.files, "
    "for all domains; several are added. Without any, each domain has its own "
    "verifier.",
  )
  timeout_s: float = setting(
    60.0,
    "Time limit of one call of these functions, in wall time: a call may wait "
    "for a network.",
    unit="seconds",
  )
  code_test_s: float = setting(
    5.0,
    "Time limit of a program per test, if its example has no time_limit. Sleep "
    "counts, waiting for a CPU does not. Public data sets allow 1 to 10 "
    "seconds.",
    unit="CPU-seconds",
  )
  code_total_s: float = setting(
    30.0, "Time limit of a program for all tests.", unit="CPU-seconds"
  )
  allow_inner: bool = setting(
    False,
    "Run programs even if bubblewrap is missing or may not create namespaces. "
    "Programs can then see which files exist, and those that use threads or "
    "files fail.",
  )
  truncated_factor: float = setting(
    1.0,
    "Factor on the reward of a truncated response; 1: unchanged. Released "
    "scripts (stop-properly coefficient) and our presets of language models "
    "have 0. Here a right answer of 6 tokens always ends.",
    source="unknown",
    phased=True,
  )
  mask_truncated: bool = setting(
    False, "Exclude truncated responses from baseline and loss.", phased=True
  )
  length_weight: float = setting(
    0.0,
    "Weight of the cosine reward; 0: off. BroRL does not say.",
    source="unknown",
    phased=True,
  )
  length_min: float = setting(
    -0.5, "Cosine reward at max_new_tokens.", source="unknown", phased=True
  )
  length_max: float = setting(
    0.0,
    "Cosine reward of an empty response.",
    source="unknown",
    phased=True,
  )
  length_steps: tuple[int, ...] = setting(
    (100, 500),
    "Steps with and without the cosine reward, in turn; (1, 0): always on. "
    "Stated by ProRL v2.",
    unit="steps",
    source="stated",
    phased=True,
  )
  overlong_weight: float = setting(
    0.0,
    "Weight of DAPO's penalty, which falls from 0 to -1 over the last tokens "
    "before the limit; 0: off. DAPO has 1.",
    phased=True,
  )
  overlong_buffer: int = setting(
    2,
    "Tokens over which that penalty falls; DAPO has 4,096 of 20,480.",
    unit="tokens",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    good = all(isinstance(v, str) and ":" in v for v in self.verifier)
    must = "functions such as ('mine.py:score', 'package.module:score')"
    yield "verifier", good, must
    good = len({*self.verifier}) == len(self.verifier)
    yield "verifier", good, "different functions"
    yield "timeout_s", self.timeout_s > 0.0, "positive"
    must = "positive; it is the time limit of a test in CPU-seconds"
    yield "code_test_s", self.code_test_s > 0.0, must
    good = self.code_total_s >= self.code_test_s
    yield "code_total_s", good, f"at least code_test_s = {self.code_test_s:g}"
    good = 0.0 <= self.truncated_factor <= 1.0
    yield "truncated_factor", good, "between 0 and 1"
    good = self.length_min <= self.length_max
    yield "length_min", good, f"at most length_max = {self.length_max}"
    yield "length_weight", self.length_weight >= 0.0, "0 or positive"
    yield "overlong_weight", self.overlong_weight >= 0.0, "0 or positive"
    steps = self.length_steps
    good = len(steps) == 2 and not any(of_kind(n, int) for n in steps)
    good = good and steps[0] >= 1 and steps[1] >= 0
    yield "length_steps", good, "two counts, the first at least 1"
