"""Reward functions that a user brings in a file or a package.

    # mine.py
    def score(response, example):
      return float(response.strip() == example["answer"])

The names of the parameters decide how it is called:

    def score(response, example) -> float | Verdict
    def score(responses, example, step) -> list of them, one for each response

`response` is one text. `responses` are all responses to one prompt, duplicates
included, in the order of the rollouts. `example` is a dict with "id", "prompt",
"messages", "source" and every column of the data line. `step` is the training
step, None in an evaluation. `example` and `step` are optional.

A function returns the reward as a number; 1 or more counts as a pass, for
pass@k and all other statistics of right answers. Or it returns a `Verdict`
(verdicts/base.py) with its own status and the answer that majority votes count
(otherwise the response).

With several functions the reward is the sum of weight times score. The first
function decides on pass or fail, the reason and the answer. A response that is
invalid for one function is invalid.

The functions run in several worker processes. Each imports the file once, so
module state is per process. They are not sandboxed: they may use the network,
files and other processes. jax sees only the CPU there. They should depend on
their arguments alone, because a resumed run calls them again.

A response becomes invalid, and is left out of the loss, if the function raises,
returns no finite number, ends its process or exceeds reward.timeout_s.

  functions.py  the signatures of a function, and its results as verdicts
  named.py      functions by name, from a file or a package
  rewards.py    the processes that call the functions, and the sum of several
"""

from brorl_jax.verdicts.own.rewards import DOMAIN, Group, Rewards

__all__ = ["DOMAIN", "Group", "Rewards"]
