"""The run as a whole: its length, policy, devices, evaluations and guards."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from brorl_jax.config.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
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


@dataclasses.dataclass(frozen=True)
class PolicyConfig(Section):
  """Weights, tokenizer and precision."""

  checkpoint: str = setting(
    "",
    "Hugging Face directory or name of a model on the hub. Two policies are "
    "embedded: '', which answers at once in at most 6 tokens, and "
    "'embedded:steps', which writes its steps first. --mode=evaluate also "
    "accepts a run folder or one of its checkpoints; --mode=export accepts "
    "only those two.",
  )
  chat_template: str = setting(
    "",
    "File of a jinja chat template, instead of the checkpoint's own. With "
    "--mode=evaluate and --mode=export '' is the template of the run.",
  )
  dtype: Literal["float32", "bfloat16", "auto"] = setting(
    "float32",
    "Precision of activations. Parameters and losses are float32. 'auto' is "
    "float32 on a CPU and bfloat16 elsewhere. A run records which it is and "
    "keeps it.",
    evaluated=True,
  )


@dataclasses.dataclass(frozen=True)
class Meshed(Section):
  """The mesh.

  A row of it is mesh_tensor x mesh_expert devices and computes its own prompts.
  """

  mesh_data: int = setting(
    1,
    "Copies of the training state, each over all devices of the other axes; "
    "with several slices of TPUs a multiple of their number.",
  )
  mesh_fsdp: int = setting(
    -1,
    "Rows that the training state of a copy is cut over; -1: as many as the "
    "devices make.",
  )
  mesh_tensor: int = setting(
    1,
    "Devices of a row that heads, key/value heads, vocabulary, feed-forward "
    "and experts are cut over.",
  )
  mesh_expert: int = setting(
    1,
    "The same but for key/value heads, so that a row may have more devices "
    "than there are of these.",
  )

  @property
  def mesh(self) -> dict[str, int]:
    """Axis -> devices along it."""
    return {
      name: getattr(self, f"mesh_{name}")
      for name in ("data", "fsdp", "tensor", "expert")
    }

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "mesh_data", "mesh_tensor", "mesh_expert")
    good = self.mesh_fsdp >= 1 or self.mesh_fsdp == -1
    yield "mesh_fsdp", good, "positive, or -1"


@dataclasses.dataclass(frozen=True)
class Devices(Meshed):
  """The mesh and its memory.

  A row of it is mesh_tensor x mesh_expert devices and computes its own prompts.
  """

  memory_bytes: int = setting(
    0,
    "Memory of one device; 0: ask the device. With a number, --mode=plan can "
    "plan for more devices than this machine has; it assumes accelerators.",
    unit="bytes",
  )
  remat: Literal["layer", "products", "nothing"] = setting(
    "layer",
    "What the backward pass recomputes. 'layer' keeps only the input of each "
    "layer; 'products' also keeps the results of matrix products; 'nothing' "
    "keeps everything. On a CPU 'products' is 5 to 10 % faster in float32.",
  )
  offload: Literal["nothing", "reference", "moments"] = setting(
    "nothing",
    "What stays in host memory between uses: the 'reference' policy, or with "
    "'moments' the optimizer's moments too.",
  )

  def rules(self) -> Iterator[Rule]:
    yield from super().rules()
    good = self.memory_bytes >= 0
    yield "memory_bytes", good, "positive, or 0: ask the device"


@dataclasses.dataclass(frozen=True)
class Eval(Section):
  """Held-out prompts, and how they are sampled.

  The defaults are those of the paper and of most published scores. They differ
  from training: a lower temperature, and the least likely 5 % are cut.
  """

  every: int = setting(10, "Steps between evaluations.", unit="steps")
  prompts: int = setting(
    60, "Held-out prompts per task.", unit="prompts", evaluated=True
  )
  n: int = setting(
    16, "Samples per held-out prompt.", source="stated", evaluated=True
  )
  temperature: float = setting(
    0.6, "0: greedy.", source="stated", evaluated=True
  )
  top_p: float = setting(0.95, "1: off.", source="stated", evaluated=True)

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "every", "prompts", "n")
    good = self.temperature >= 0.0
    yield "temperature", good, "positive, or 0: greedy"
    good = 0.0 < self.top_p <= 1.0
    yield "top_p", good, "above 0 and at most 1 (off)"


@dataclasses.dataclass(frozen=True)
class Guard(Section):
  """When a run warns that it collapses, and when it ends.

  A warning is an event, a line on the terminal and the metric guard/alarms. The
  usual entropy is the mean of the run's first 20 steps.
  """

  entropy_low: float = setting(
    0.1,
    "Warn below this times the usual entropy of the rollouts; 0: never. With "
    "answers of six tokens it went down to .3 in 30 steps, and with N = 16 to "
    ".2 in 60.",
    free=True,
  )
  kl: float = setting(
    1.0,
    "Warn above this KL to the reference; 0: never. 24 to 60 healthy steps "
    "have up to .35, the learning rate above 7.",
    unit="nats per token",
    free=True,
  )
  truncated: float = setting(
    0.8, "Warn above this share of cut rollouts; 0: never.", free=True
  )
  score_drop: float = setting(
    0.1,
    "Warn if the held-out score is this much below the best one while the mean "
    "reward is higher than it was then; 0: never. The 95 % interval of 480 "
    "prompts is .04.",
    free=True,
  )
  end_after: int = setting(
    0,
    "End the run if a number has been beyond its bound for so many steps in a "
    "row; 0: only warn. The step is saved before.",
    unit="steps",
    free=True,
  )

  def rules(self) -> Iterator[Rule]:
    good = 0.0 <= self.entropy_low < 1.0
    yield "entropy_low", good, "at least 0 and below 1"
    for name in ("truncated", "score_drop"):
      yield name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1"
    yield from self.at_least(0, "kl", "end_after")


@dataclasses.dataclass(frozen=True)
class Theory(Section):
  """The prompts of a step on which the theorem is measured."""

  prompts: int = setting(
    2,
    "Prompts per step, each with its 16 most probable responses of at most 128 "
    "tokens; 0: the theorem is not measured. 2 x 16 answers of 6 tokens cost "
    "less than 2 % of a step.",
    unit="prompts",
  )

  def rules(self) -> Iterator[Rule]:
    good = self.prompts >= 0
    yield "prompts", good, "positive, or 0: the theorem is not measured"
