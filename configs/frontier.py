r"""Arms of the frontier experiment, which `launch/frontier.sh` runs.

  bash launch/frontier.sh

The argument is TASK/N/SAMPLES/ADVANTAGE/RECIPE, such as

  own/16/2048/maxrl/plain

A task is a set of prompts (`launch/frontier/`), SAMPLES are those of a step,
and so N decides how many prompts it has. N = "adaptive": 16 to 512 rollouts per
prompt, until four are right and four are wrong, of SAMPLES / 64 prompts.

  plain   every group is trained on, one update per step, no KL term. What
          differs between arms is N, and nothing else.
  whole   dynamic sampling, two updates per step (one if a step has one prompt),
          and a KL term whose reference is reset: the recipe of BroRL
  anchored
          every group is trained on, two updates per step, and a KL term so
          strong that no prompt is lost. Dynamic sampling keeps the KL term from
          prompts that are never solved; with it N = 16 took 40 of 64 hard
          prompts below 1e-4, where 512 rollouts see nothing either.

The command line gives files, policy, rate, seed, steps, and the decay.
"""

from typing import Any

from brorl_jax.configs import base, n512

# Longest prompt and response in tokens; a character is a token. "reasoning" is
# the run of n512.py, whose answers have steps, with other values of N.
TASKS = dict(shared=(8, 5), own=(10, 4), countdown=(20, 8), reasoning=(80, 160))
ADVANTAGES = ("leave_one_out", "grpo", "maxrl", "tokens")
RECIPES = ("plain", "whole", "anchored")


def get_config(which: str = "own/16/2048/maxrl/plain"):
  task, n, samples, advantage, recipe = [*which.split("/"), *" " * 4][:5]
  good = (
    task in TASKS
    and (n.isdigit() or n == "adaptive")
    and samples.isdigit()
    and advantage in ADVANTAGES
    and recipe in RECIPES
    and which.count("/") == 4
  )
  if not good:
    raise ValueError(
      f"{which!r} is not TASK/N/SAMPLES/ADVANTAGE/RECIPE, such as "
      f"own/16/2048/maxrl/plain; tasks: {', '.join(TASKS)}; advantages: "
      f"{', '.join(ADVANTAGES)}; recipes: {', '.join(RECIPES)}"
    )
  c: Any = n512.get_config() if task == "reasoning" else base.get_config()
  c.data.prompt_tokens, c.sampling.max_new_tokens = TASKS[task]
  c.sampling.samples = int(samples)
  if n == "adaptive":
    # The groups of N = 16. Rounds end by need; a hard prompt takes 512.
    c.sampling.n, c.sampling.rounds = 512, (16, 64, 256, 512)
    c.sampling.samples = 512 * max(int(samples) // 64, 4)
    c.sampling.in_flight = 0
  else:
    c.sampling.n = int(n)
    c.sampling.in_flight = min(c.sampling.samples, 8192)
  c.advantage.kind = advantage
  c.optim.minibatches = 1
  c.optim.warmup = 2
  c.reference.kl_weight = 0.0
  c.filter.keep = "all"
  if recipe == "whole":
    c.filter.keep = "differ"
    c.filter.max_oversampling = 100
    prompts = c.sampling.samples // c.sampling.n
    c.optim.minibatches = min(2, prompts)
    c.reference.kl_weight = 1e-3
    c.reference.reset_every = 100
  if recipe == "anchored":
    c.optim.minibatches = 2
    c.reference.kl_weight = 0.6
    c.reference.reset_every = 100_000  # never within a run
  c.theory.prompts = 0
  if task == "reasoning":
    c.sampling.slots = min(c.sampling.n, 128)
    c.sampling.lanes = 128 // c.sampling.slots
    c.sampling.in_flight = 0
    # Measures what is trained: pass@1 at temperature 1, from 16 samples.
    c.eval.temperature, c.eval.top_p = 1.0, 1.0
  else:
    c.reward.verifier = ("launch/frontier/match.py:score",)
    c.eval.every = 100_000  # p is read from checkpoints
    c.eval.prompts = 8
  c.run.keep_checkpoints = 100_000
  return c
