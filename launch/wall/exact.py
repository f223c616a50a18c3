"""The probability of every right answer, read from the parameters.

One forward pass over all answers, and no sampling: p of a prompt is the sum of
the probabilities of its right answers. Tokens are characters, so there is one
spelling of each.
"""

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.model import huggingface, tokenizer
from brorl_jax.runs import checkpoints

_AT_ONCE = 64  # prompts


class Known:
  """Prompts and their right answers as tokens, padded to one shape.

  `some` [P, A] says which answers there are.
  """

  def __init__(
    self, lines: Sequence[Mapping[str, Any]], text: tokenizer.Tokenizer
  ):
    prompts = [
      text.render([{"role": "user", "content": line["prompt"]}])
      for line in lines
    ]
    said = [
      [[*text.encode(a), text.stop_ids[0]] for a in line["right"]]
      for line in lines
    ]
    width = max(map(len, prompts))
    self.prompt, self.prompt_mask = tokenizer.left_pad(prompts, width)
    most = max(1, *map(len, said))
    longest = max(len(ids) for row in said for ids in row)
    self.response = np.zeros((len(said), most, longest), np.int32)
    self.mask = np.zeros(self.response.shape, bool)
    for p, row in enumerate(said):
      for a, ids in enumerate(row):
        self.response[p, a, : len(ids)] = ids
        self.mask[p, a, : len(ids)] = True
    self.some: np.ndarray = np.any(self.mask, axis=2)


@functools.cache
def reader(policy):
  """(params, known) -> [P, A], the probability of each answer, on the host."""

  @jax.jit
  def logp(params, prompt, prompt_mask, response, mask):
    each, _ = policy.response_logp(params, prompt, prompt_mask, response)
    return jnp.sum(each, axis=-1, where=mask)

  def read(params, k: Known) -> np.ndarray:
    out = []
    for i in range(0, len(k.prompt), _AT_ONCE):
      rows = np.arange(i, i + _AT_ONCE) % len(k.prompt)
      of = (k.prompt, k.prompt_mask, k.response, k.mask)
      out.append(np.asarray(logp(params, *(x[rows] for x in of)), np.float64))
    found = np.concatenate(out)[: len(k.prompt)]
    return np.where(k.some, np.exp(found), 0.0)

  return read


def lines_of(path: str | pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(x) for x in pathlib.Path(path).read_text().splitlines()]


def pass_rates(
  policy_dir: pathlib.Path, lines: Sequence[Mapping[str, Any]]
) -> np.ndarray:
  """[P, A]: p of each answer under a policy."""
  policy, params = huggingface.load(policy_dir)
  return reader(policy)(params, Known(lines, tokenizer.Tokenizer(policy_dir)))


def of_run(
  run: pathlib.Path, most: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
  """(step, p of the trained prompts, of their twins), [P, A] each, of the start
  and of at most this many checkpoints of a run, the last one among them.
  """
  config = json.loads((run / "config.json").read_text())["config"]
  source = huggingface.locate(config["policy"]["checkpoint"])
  (trained,), (twins,) = (
    config["data"][files] for files in ("files", "heldout_files")
  )
  policy, first = huggingface.load(source)
  read, text = reader(policy), tokenizer.Tokenizer(source)
  known, others = (Known(lines_of(path), text) for path in (trained, twins))
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
  )
  names = [path.name for path in (run / "checkpoints").iterdir()]
  steps = sorted({int(name) for name in names if name.isdigit()} - {0})
  every = max(-(-len(steps) // most), 1)
  for step in [0, *steps[::-1][::every][::-1]]:
    params = first
    if step:
      _, params = checkpoints.read_params(run / "checkpoints", step, like)
    yield step, read(params, known), read(params, others)
