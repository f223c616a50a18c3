"""The run as a whole: its length, policy, devices, evaluations and guards."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from brorl_jax.config.section import Rule, Section, evaluated, free, setting


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
  """How long a run is, and what it writes."""

  seed: int = evaluated(
    0,
    "Seed of puzzles, rollouts and shuffling. All randomness derives from "
    "(seed, step).",
  )
  steps: int = free(
    60,
    "Length of the run. A step is one round of rollouts, then "
    "optim.minibatches updates.",
    unit="steps",
  )
  max_samples: int = free(
    0,
    "The run ends with the step that reaches this number of rollouts, those of "
    "rejected prompts included; 0: no bound.",
    unit="rollouts",
  )
  save_every: int = free(10, "Steps between checkpoints.", unit="steps")
  keep_checkpoints: int = free(
    3,
    "Number of newest checkpoints to keep. The saved step with the best "
    "held-out score is kept too. Only steps that are both saved and evaluated "
    "have a score: let eval.every be a multiple or a divisor of save_every.",
  )
  keep_every: int = free(
    0,
    "Checkpoints of multiples of this step are kept too, as a way back from a "
    "slow collapse; 0: none.",
    unit="steps",
  )
  max_age: int = setting(
    0,
    "Steps that a rollout may cross, going on under newer parameters, so that "
    "no device waits for the longest; 0: none.",
    unit="steps",
  )
  wandb: str = free(
    "", "Weights & Biases project to log to; '': none. Needs the extra `wandb`."
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
    must = f"0 or a multiple of save_every = {self.save_every}"
    yield "keep_every", good, must
    yield from self.at_least(0, "max_samples", zero="no bound")
    yield "max_age", 0 <= self.max_age <= 100, "0 to 100"
    good = not set(self.wandb) & set("/\\#?%:")
    yield "wandb", good, "a name without any of / \\ # ? % :"


LORA_LAYERS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class PolicyConfig(Section):
  """Weights, tokenizer and precision."""

  checkpoint: str = setting(
    "",
    "Hugging Face directory or model of the hub, NAME or NAME@revision. "
    "Embedded are '', which answers at once in at most 6 tokens, "
    "'embedded:steps', which writes its steps first, and 'embedded:hard', "
    "which guesses. --mode=evaluate and --mode=export accept a run folder or "
    "one of its checkpoints.",
  )
  chat_template: str = setting(
    "",
    "File of a jinja chat template, instead of the checkpoint's own. With "
    "--mode=evaluate and --mode=export '' is the template of the run.",
  )
  dtype: Literal["float32", "bfloat16", "auto"] = evaluated(
    "float32",
    "Precision of activations. Parameters and losses are float32. 'auto' is "
    "float32 on a CPU and bfloat16 elsewhere; a run keeps its first choice.",
  )
  lora_rank: int = setting(
    0,
    "LoRA (arXiv:2106.09685): train matrices of this rank beside the weights, "
    "which stay as they are; 0: train all parameters. It wants about ten times "
    "the optim.lr (Schulman et al. 2025), and reference.reset_every = 0. "
    "--mode=evaluate and --mode=export take it from the run.",
  )
  lora_alpha: float = setting(
    32.0, "What LoRA adds is multiplied by this / lora_rank.", source="unknown"
  )
  lora_layers: tuple[str, ...] = setting(
    LORA_LAYERS,
    "Products that LoRA adapts: of attention q, k, v, o; of the feed-forward "
    "gate, up, down. Without the latter it learns less (Schulman et al. 2025).",
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(0, "lora_rank", zero="all parameters are trained")
    yield from self.positive("lora_alpha")
    layers = self.lora_layers
    good = 0 < len(layers) == len({*layers} & {*LORA_LAYERS})
    yield "lora_layers", good, f"different ones of {', '.join(LORA_LAYERS)}"
    said = self.lora_alpha != 32.0 or layers != LORA_LAYERS
    good = self.lora_rank > 0 or not said
    yield "lora_rank", good, "at least 1 with lora_alpha or lora_layers"


@dataclasses.dataclass(frozen=True)
class Devices(Section):
  """The mesh; a row, mesh_tensor x mesh_expert devices, has its own prompts."""

  mesh_data: int = setting(
    1,
    "Copies of the training state, each on all devices of the other axes; on "
    "several TPU slices a multiple of their number.",
  )
  mesh_fsdp: int = setting(
    -1,
    "Rows among which a copy of the training state is divided; -1: as many as "
    "there are.",
  )
  mesh_tensor: int = setting(
    1,
    "Devices of a row among which heads, key/value heads, vocabulary, "
    "feed-forward and experts are divided.",
  )
  mesh_expert: int = setting(
    1,
    "The same without key/value heads, of which there may be fewer than "
    "devices.",
  )
  remat: Literal["layer", "products", "nothing"] = setting(
    "layer",
    "What the backward pass recomputes. 'layer' keeps the input of each layer; "
    "'products' also the results of matrix products, 5 to 10 % faster on a "
    "CPU; 'nothing' keeps everything.",
  )
  memory_bytes: int = setting(
    0,
    "Memory of one device; 0: ask the device. With a number, --mode=plan plans "
    "for more accelerators than this machine has.",
    unit="bytes",
  )
  offload: Literal["nothing", "reference", "moments"] = setting(
    "nothing",
    "What is in host memory between uses: the 'reference' policy, or with "
    "'moments' also the optimizer's moments.",
  )

  @property
  def mesh(self) -> dict[str, int]:
    names = ("data", "fsdp", "tensor", "expert")
    return {name: getattr(self, f"mesh_{name}") for name in names}

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "mesh_data", "mesh_tensor", "mesh_expert")
    good = self.mesh_fsdp >= 1 or self.mesh_fsdp == -1
    yield "mesh_fsdp", good, "positive, or -1"
    yield from self.at_least(0, "memory_bytes", zero="ask the device")


@dataclasses.dataclass(frozen=True)
class Eval(Section):
  """Held-out prompts, and how they are sampled.

  The defaults are those of the paper and of most published scores. They differ
  from training: a lower temperature, and the least likely 5 % are cut.
  """

  every: int = setting(10, "Steps between evaluations.", unit="steps")
  prompts: int = evaluated(
    60,
    "Held-out prompts per task. 0: all of the files, and 100 puzzles of each "
    "family, or as many as there are.",
    unit="prompts",
  )
  n: int = evaluated(16, "Samples per held-out prompt.", source="stated")
  temperature: float = evaluated(0.6, "0: greedy.", source="stated")
  top_p: float = evaluated(0.95, "1: off.", source="stated")
  max_new_tokens: int = evaluated(
    0,
    "Longest response, including its end token. 0: that of sampling.",
    unit="tokens",
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "every", "n")
    yield from self.at_least(0, "prompts", zero="all")
    yield from self.at_least(0, "temperature", zero="greedy")
    zero = "that of sampling"
    yield from self.at_least(0, "max_new_tokens", zero=zero)
    yield "top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1; 1 is off"


@dataclasses.dataclass(frozen=True)
class Guard(Section):
  """When a run warns that it collapses, and when it ends.

  A warning is an event, a line on the terminal and the metric guard/alarms. The
  usual entropy is the mean of the run's first 20 steps.
  """

  entropy_low: float = free(
    0.1,
    "Warn below this fraction of the usual entropy of rollouts; 0: never. With "
    "six-token answers it fell to 0.3 in 30 healthy steps.",
  )
  kl: float = free(
    1.0,
    "Warn above this KL to the reference; 0: never. 60 healthy steps had up to "
    "0.35, and a learning rate that was too high had 7.",
    unit="nats per token",
  )
  truncated: float = free(
    0.8, "Warn above this share of cut rollouts; 0: never."
  )
  score_drop: float = free(
    0.1,
    "Warn if the held-out score is this much below its best while the mean "
    "reward rose; 0: never. Of 480 prompts the 95 % interval is 0.04.",
  )
  end_after: int = free(
    0,
    "End the run, after saving, when a number was beyond its bound for this "
    "many steps in a row; 0: only warn.",
    unit="steps",
  )

  def rules(self) -> Iterator[Rule]:
    low = self.entropy_low
    yield "entropy_low", 0.0 <= low < 1.0, "at least 0 and below 1"
    for name in ("truncated", "score_drop"):
      yield name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1"
    yield from self.at_least(0, "kl", "end_after")


@dataclasses.dataclass(frozen=True)
class Theory(Section):
  """The prompts of a step on which the theorem is measured."""

  prompts: int = setting(
    2,
    "Prompts per step, each with its 16 most probable responses of at most 128 "
    "tokens; 0: the theorem is not measured. 2 cost less than 2 % of a step.",
    unit="prompts",
  )

  def rules(self) -> Iterator[Rule]:
    zero = "the theorem is not measured"
    yield from self.at_least(0, "prompts", zero=zero)
