"""Folders of runs and evaluations as they are written, with chosen numbers."""

import json
import pathlib

import jax
import numpy as np
from configured import SHORT

from brorl_jax import config as sections
from brorl_jax.model import huggingface
from brorl_jax.runs import checkpoints, folder
from brorl_jax.types import State

CONFIG = {
  "run": {"seed": 0, "steps": 3, "phases": []},
  "data": {
    "domains": {"gym": {"instruction": ""}, "math": {"instruction": "Box it."}},
    "families": {"gcd": {"weight": 1.0, "settings": {"max_value": 40}}},
  },
  "sampling": {"n": 4, "samples": 8}, "advantage": {"kind": "tokens"},
  "loss": {"kind": "ppo"}, "optim": {"lr": 1e-3},
  "eval": {"temperature": 0.6, "top_p": 0.95},
}  # fmt: skip
# Id of each prompt -> its domain and task.
PROMPTS = {
  "gcd/heldout/0": ("gym", "gcd"), "gcd/heldout/1": ("gym", "gcd"),
  "syllogism/heldout/0": ("gym", "syllogism"), "aime/7": ("math", "aime"),
}  # fmt: skip
PASSES = {  # of the two samples of each prompt, by step
  0: ([0, 0], [1, 0], [0, 0], [0, 0]),
  1: ([1, 0], [1, 0], [0, 0], [0, 0]),
  3: ([1, 1], [1, 0], [1, 0], [0, 1]),
}


def problems(path, numbers, *, prefix="q", domain="math"):
  lines = [{"id": f"{prefix}-{i}",
      "domain": domain, "prompt": f"What is {i} + 5?", "answer": str(i + 5)}
    for i in numbers]  # fmt: skip
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def records(step, passes, prompts=PROMPTS, *, tokens=5):
  return [
    {
      "step": step, "id": name, "domain": domain, "task": task, "sample": n,
      "tokens": tokens + n, "truncated": False, "score": float(right),
      "pass": bool(right), "status": "pass" if right else "fail",
      "reason": "" if right else "wrong answer", "answer": str(right),
    }
    for (name, (domain, task)), row in zip(prompts.items(), passes, strict=True)
    for n, right in enumerate(row)
  ]  # fmt: skip


def metric_lines(
  steps, *, step_s=3600.0, samples=16, cpu_s=1800.0, compile_s=0.0
):
  """Lines of metrics.jsonl; the first step takes twice the time."""
  return [
    {
      "step": step, "time/step_s": step_s * (2 if step == 1 else 1),
      "time/checkpoint_s": 0.0 if step == 1 else step_s / 10,
      "time/rollout_s": step_s / 4, "data/samples_total": samples * step,
      "data/tokens_total": 10 * samples * step,
      "sampling/pass_rate": 0.25 + 0.25 * (step % 2),
      "reward/std_within_group": 0.125 * step, "time/cpu_s": cpu_s,
      "time/compile_s": compile_s,
    }
    for step in range(1, steps + 1)
  ]  # fmt: skip


def merged(config, changes):
  out = json.loads(json.dumps(config))
  for field, value in changes.items():
    *above, last = field.split(".")
    place = out
    for name in above:
      place = place[name]
    place[last] = value
  return out


def dump(path, lines):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(
  path, *, passes=None, prompts=None, lines=None, held="abc", tokens=5, **config
):
  path, passes = pathlib.Path(path), passes or PASSES
  prompts = prompts or PROMPTS
  names = {name: name.replace("__", ".") for name in config}
  changes = {SHORT.get(names[k], names[k]): v for k, v in config.items()}
  about = {"config": merged(CONFIG, changes),
    "git_commit": "0" * 40, "python": "3.11.7", "versions": {"jax": "0.10.2",
      "reasoning-gym": "0.1.25"}, "data": {"held out": held}}  # fmt: skip
  path.mkdir(parents=True)
  (path / "config.json").write_text(json.dumps(about))
  dump(path / "metrics.jsonl", lines or metric_lines(max(passes) or 1))
  each = [records(k, p, prompts, tokens=tokens) for k, p in passes.items()]
  dump(path / "eval" / "records.jsonl", [one for some in each for one in some])
  dump(path / "eval" / "curve.jsonl", [{"step": step} for step in passes])
  return path


def told(path, **entries):
  """A folder of a run with more entries in config.json."""
  about = json.loads((path / "config.json").read_text()) | entries
  (path / "config.json").write_text(json.dumps(about))
  return path


def with_checkpoints(path, c, steps, **found):
  path.mkdir(exist_ok=True)
  began = str(huggingface.locate(c.policy.checkpoint))
  found = {"forms": {}, "dropped": [], "began_with": began, **found}
  found = {"run": "mine", "files": {}, **found}
  folder.write_config(sections.as_dict(c), path, **found)
  _, params = huggingface.load(huggingface.ASSETS)
  store = checkpoints.Store(path / "checkpoints", keep=9, run="mine")
  for step in steps:
    moved = jax.tree.map(lambda x, s=step: x * (1 + 0.01 * s), params)
    store.save(step, State(np.int32(step), moved, {}, None), {})
  store.close()
  return path


def evaluation(path, *, passes=PASSES[3], **config):
  path = run(path, passes={0: passes}, **config)
  (path / "metrics.jsonl").unlink()
  (path / "eval" / "curve.jsonl").unlink()
  (path / "eval" / "summary.json").write_text("{}")
  policy = {"source": "/x", "run": "/runs/n512", "step": 60}
  return told(path, evaluated=policy)
