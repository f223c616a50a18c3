"""From rewards to advantages; read by main/stages/advantages.py."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Advantage(Section):
  """Baseline, scale, and the credit of correct rollouts."""

  kind: str = setting(
    "tokens",
    "REINFORCE++-baseline, whitened over 'tokens' (as in the released code) or "
    "'trajectories' (as in the paper's formula); 'grpo'; 'centered': the "
    "reward minus the mean of its group; 'leave_one_out': minus the mean of "
    "the other rollouts (RLOO); 'maxrl': minus the mean, divided by the mean; "
    "'pass_at_k': the gradient of pass@k, see k; 'focal': 'grpo' with less of "
    "the prompts that are often solved, see gamma. "
    "Your own function is 'file.py:function' or 'package.module:function', "
    "from (reward [P,N], valid [P,N], length [P,N]) to advantages [P,N] in "
    "jax.numpy. Dr. GRPO is 'centered' with loss.mean = 'constant'.",
    source="stated",
    phased=True,
  )
  k: int = setting(
    4,
    "Of 'pass_at_k': samples of which one must be right. The largest useful "
    "value is a quarter of the fewest rollouts of a prompt, n or n_min: with "
    "more, most groups hold no k wrong ones, and carry no gradient.",
    phased=True,
  )
  gamma: float = setting(
    1.0,
    "Of 'focal': advantages are multiplied by (1 - share of right ones)^gamma. "
    "0.5 to 1 in F-GRPO.",
    phased=True,
  )
  stop_weight: Literal["pooled", "rounds", "exact"] = setting(
    "pooled",
    "What a prompt weighs whose number of rollouts is its own "
    "(sampling.allocation). 'pooled': as much as any other, over all of its "
    "rollouts; a stop biases that a little. 'exact': without the bias of the "
    "plain gradient ('leave_one_out'), with more variance. 'rounds': each "
    "round has its own baseline and all are added, which weighs a prompt by "
    "its expected number of rollouts, about in inverse proportion to its pass "
    "rate. The last two need allocation 'stop'.",
    phased=True,
  )
  train_on: int = setting(
    0,
    "Rollouts of a prompt that are trained on, after all of them had their "
    "advantage; 0: all. The others are left out of the update, which is most "
    "of a step with long answers.",
    unit="rollouts",
    phased=True,
  )
  choose: Literal["random", "stratified", "variance", "different"] = setting(
    "stratified",
    "Which ones, with weights that leave the gradient as it is on average. "
    "'stratified': half of them right and half wrong, as far as there are so "
    "many. 'variance': the highest and the lowest rewards (PODS); biased if "
    "rewards have more than two values. 'different': of the different "
    "responses. 'random': any.",
    phased=True,
  )
  credit: Literal["equal", "distinct"] = setting(
    "equal",
    "How the correct rollouts of a group share the credit. 'equal': the same "
    "for each rollout. 'distinct': the same for each different answer. Not in "
    "BroRL.",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "k")
    yield from self.at_least(0, "gamma", "train_on")
