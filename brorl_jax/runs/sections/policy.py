"""Which policy; read by main/commands/train.py."""

import dataclasses
from typing import Literal

from brorl_jax.runs.sections.section import Section, setting


@dataclasses.dataclass(frozen=True)
class Policy(Section):
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
