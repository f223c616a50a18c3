"""From rewards to advantages; read by main/stages/advantages.py."""

import dataclasses
from typing import Literal

from brorl_jax.runs.sections.section import Section, setting


@dataclasses.dataclass(frozen=True)
class Advantage(Section):
  """Baseline, scale, and the credit of correct rollouts."""

  kind: str = setting(
    "tokens",
    "REINFORCE++-baseline, whitened over 'tokens' (as in the released code) or "
    "'trajectories' (as in the paper's formula); 'grpo'; 'centered': the "
    "reward minus the mean of its group; 'leave_one_out': minus the mean of "
    "the other rollouts (RLOO); 'maxrl': minus the mean, divided by the mean. "
    "Your own function is 'file.py:function' or 'package.module:function', "
    "from (reward [P,N], valid [P,N], length [P,N]) to advantages [P,N] in "
    "jax.numpy. Dr. GRPO is 'centered' with loss.mean = 'constant'.",
    source="stated",
    phased=True,
  )
  credit: Literal["equal", "distinct"] = setting(
    "equal",
    "How the correct rollouts of a group share the credit. 'equal': the same "
    "for each rollout. 'distinct': the same for each different answer. Not in "
    "BroRL.",
    phased=True,
  )
