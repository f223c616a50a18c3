"""The probability of every known right answer, read from checkpoints.

  python -m launch.revival.exact runs/revival/countdown RUN [RUN ...]

For each checkpoint of each run one line of RUN/exact.jsonl, by side (train,
heldout) with one number per prompt:

  pass_at_1   sum of p over the right answers, as spelt in known.json
  covered     share of them with p > 1e-4
  distinct    expected number of different ones in 256 samples,
              sum of 1 - (1 - p)^256
  fell        share of them that lost mass since the policy the run began with
  lost        the mass that they lost

This is a lower bound if the policy can spell an answer in another way, with
brackets or spaces. No sampling: one forward pass over all answers.

For tasks with steps before the answer, the responses are those whose steps lead
to it. The scorer sees only the answer, and the policy learns to write any
steps. So each line also has the results of 64 samples per training prompt
("drawn"):

  pass_at_1   share of right answers
  distinct    different right ones
"""

import argparse
import json
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.model import huggingface, tokenizer
from brorl_jax.rollout import sampler
from brorl_jax.runs import checkpoints, metrics
from brorl_jax.tasks import gym

SAMPLES, COVERED = 256, 1e-4
DRAWN = 64


def measures(
  logp: np.ndarray, before: np.ndarray, some: np.ndarray
) -> dict[str, list[float]]:
  """The measures of each prompt.

  Args:
    logp: [P, A], of the known right answers, padded.
    before: Where the run began.
    some: Mask of the padding.
  """
  p, old = (np.where(some, np.exp(x), 0.0) for x in (logp, before))
  count, mass = some.sum(axis=1), p.sum(axis=1)
  never = np.log1p(-np.minimum(p, 1.0 - 1e-12))  # drawn in one sample
  values = {
    "pass_at_1": mass,
    "covered": (p > COVERED).sum(axis=1) / count,
    "distinct": -np.expm1(SAMPLES * never).sum(axis=1),
    "fell": ((p < old) & some).sum(axis=1) / count,
    "lost": np.maximum(old - p, 0.0).sum(axis=1),
  }
  return {name: np.round(x, 9).tolist() for name, x in values.items()}


class Known:
  """The right answers of one side as tokens.

  Attributes:
    steps: Whether steps come before the answers.
  """

  def __init__(
    self, folder: pathlib.Path, side: str, text: tokenizer.Tokenizer
  ):
    known = json.loads((folder / "known.json").read_text())[side]
    lines = metrics.read_lines(folder / f"{side}.jsonl")
    prompts = [
      text.render([{"role": "user", "content": line["prompt"]}])
      for line in lines
    ]
    said = [
      [[*text.encode(a), text.stop_ids[0]] for a in known[line["id"]]]
      for line in lines
    ]
    self.entries = [line["entry"] for line in lines]
    self.steps = "<answer>" in known[lines[0]["id"]][0]
    width = max(map(len, prompts))
    self.prompt, self.prompt_mask = tokenizer.left_pad(prompts, width)
    most = max(map(len, said))
    longest = max(len(ids) for row in said for ids in row)
    self.response = np.zeros((len(said), most, longest), np.int32)
    self.mask = np.zeros(self.response.shape, bool)
    for p, row in enumerate(said):
      for a, ids in enumerate(row):
        self.response[p, a, : len(ids)] = ids
        self.mask[p, a, : len(ids)] = True
    self.some: np.ndarray = np.any(self.mask, axis=2)


def reader(policy):
  """(params, known) -> log-probability of each answer, on the host."""

  @jax.jit
  def logp(params, prompt, prompt_mask, response, mask):
    each, _ = policy.response_logp(params, prompt, prompt_mask, response)
    return jnp.sum(each, axis=-1, where=mask)

  def read(params, k: Known):
    found = logp(params, k.prompt, k.prompt_mask, k.response, k.mask)
    return np.asarray(found, np.float64)

  return read


def drawn(
  policy, params, text: tokenizer.Tokenizer, k: Known, *, max_new_tokens: int
) -> dict[str, list[float]]:
  """Samples with the same random numbers for each checkpoint."""
  out = sampler.sample(
    policy,
    params,
    [
      row[some].tolist()
      for row, some in zip(k.prompt, k.prompt_mask, strict=True)
    ],
    jax.random.key(0),
    n=DRAWN,
    max_new_tokens=max_new_tokens,
    stop_ids=text.stop_ids,
  )
  tokens, mask = jax.device_get((out.tokens, out.mask))
  rate, distinct = [], []
  for entry, row, some in zip(k.entries, tokens, mask, strict=True):
    said = Counter(
      text.decode(ids[m].tolist() for ids, m in zip(row, some, strict=True))
    )
    verdicts = {one: gym.verify(one, entry) for one in said}
    right = [one for one in said if verdicts[one].status == "pass"]
    rate.append(sum(said[one] for one in right) / DRAWN)
    distinct.append(len({verdicts[one].answer for one in right}))
  return {"pass_at_1": rate, "distinct": distinct}


def measure(folder: pathlib.Path, run: pathlib.Path) -> None:
  """Adds lines for the checkpoints that have none yet."""
  config = json.loads((run / "config.json").read_text())["config"]
  source = pathlib.Path(config["policy"]["checkpoint"])
  policy, first = huggingface.load(source)
  read, text = reader(policy), tokenizer.Tokenizer(source)
  sides = {name: Known(folder, name, text) for name in ("train", "heldout")}
  start = {name: read(first, k) for name, k in sides.items()}
  steps = sorted(
    int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()
  )
  lines = metrics.JsonLines(run / "exact.jsonl", after=steps[-1])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
  )
  for step in sorted({0, *steps}):
    if step in lines.steps:
      continue
    params = first
    if step:
      _, params = checkpoints.read_params(run / "checkpoints", step, like)
    line = {
      name: measures(read(params, k), start[name], k.some)
      for name, k in sides.items()
    }
    if sides["train"].steps:
      most = config["sampling"]["max_new_tokens"]
      line["drawn"] = drawn(
        policy, params, text, sides["train"], max_new_tokens=most
      )
    lines.write({"step": step, **line})
  lines.close()


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("runs", type=pathlib.Path, nargs="+")
  a = parser.parse_args()
  for run in a.runs:
    measure(a.folder, run)


if __name__ == "__main__":
  main()
