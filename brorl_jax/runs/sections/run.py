"""The run as a whole; read by main/commands/train.py."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Run(Section):
  """How long a run is, and what it writes."""

  seed: int = setting(
    0,
    "Seed of puzzles, rollouts and shuffling. All randomness derives from "
    "(seed, step).",
    evaluated=True,
  )
  steps: int = setting(
    60,
    "Length of the run. A step is one round of rollouts, then "
    "optim.minibatches updates.",
    unit="steps",
    free=True,
  )
  max_samples: int = setting(
    0,
    "The run ends with the step at which it has generated so many rollouts, "
    "those of rejected prompts included; 0: no bound.",
    unit="rollouts",
    free=True,
  )
  save_every: int = setting(
    10, "Steps between checkpoints.", unit="steps", free=True
  )
  keep_checkpoints: int = setting(
    3,
    "Number of newest checkpoints to keep. The saved step with the best "
    "held-out score, the earliest of equals, is kept too. Only steps that are "
    "both saved and evaluated have a score, so let eval.every be a multiple of "
    "save_every or its divisor. Resets of the reference change nothing.",
    free=True,
  )
  keep_every: int = setting(
    0,
    "Checkpoints of multiples of this are kept too; 0: none. A way back from "
    "what is seen late, such as a slow collapse.",
    unit="steps",
    free=True,
  )
  wandb: str = setting(
    "",
    "Weights & Biases project to log to; '': none. Needs the extra `wandb`.",
    free=True,
  )
  notify: str = setting(
    "",
    "Command, called with an event of the run as JSON on standard input: "
    "start, resume, warning, guard, end. The run waits for it, at most 30 s. "
    "Without a shell; its failure is only told. config.json holds it: no "
    "passwords. '': none.",
    free=True,
  )
  pipeline: bool = setting(
    False,
    "Sample the next step with the parameters before the update. The update "
    "then runs while the devices wait for verifiers. The step after a "
    "checkpoint is sampled after the update.",
  )
  phases: tuple[Mapping[str, Any], ...] = setting(
    (),
    "Changes of fields during the run, such as {'from_step': 201, "
    "'sampling.n': 32}.",
  )

  def rules(self) -> Iterator[Rule]:
    yield "seed", 0 <= self.seed < 2**31, "0 to 2**31 - 1"
    yield from self.at_least(1, "steps", "save_every", "keep_checkpoints")
    good = not self.keep_every % self.save_every and self.keep_every >= 0
    yield (
      "keep_every",
      good,
      f"0 or a multiple of save_every = {self.save_every}",
    )
    good = self.max_samples >= 0
    yield "max_samples", good, "positive, or 0: no bound"
    good = not set(self.wandb) & set("/\\#?%:")
    yield "wandb", good, "a name without any of / \\ # ? % :"
    yield "notify", _is_command(self.notify), "words with closed quotes"


def _is_command(text: str) -> bool:
  try:
    return bool(shlex.split(text)) or not text
  except ValueError:
    return False
