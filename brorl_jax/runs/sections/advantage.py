"""From rewards to advantages; read by main/stages/advantages.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Advantage(Section):
  """Baseline and scale."""

  kind: str = setting(
    "tokens",
    "REINFORCE++-baseline, whitened over 'tokens' (as in the released code) or "
    "'trajectories' (as in the paper's formula); 'grpo'; 'centered': the "
    "reward minus the mean of its group; 'leave_one_out': minus the mean of "
    "the other rollouts (RLOO); 'maxrl': minus the mean, divided by the mean; "
    "'pass_at_k': the gradient of pass@k, see k. Your own function is "
    "'file.py:function' or 'package.module:function', from (reward [P,N], "
    "valid [P,N], length [P,N]) to advantages [P,N] in jax.numpy. Dr. GRPO is "
    "'centered' with loss.mean = 'constant'.",
    source="stated",
    phased=True,
  )
  k: int = setting(
    4,
    "Of 'pass_at_k': samples of which one must be right. The largest useful "
    "value is a quarter of the fewest rollouts of a prompt, n or rounds[0]: "
    "with more, most groups hold no k wrong ones, and carry no gradient.",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "k")
