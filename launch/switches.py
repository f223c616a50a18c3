"""What each part of the recipe does to a short run: one row per switch.

  python launch/switches.py --workdir=runs/switches

Every run is the first of its list with one thing changed, from the same seed:
24 steps of 64 prompts x 32 rollouts of the embedded policy that answers at
once. What depends on lengths changes the run of `n512.py`, 24 steps of 16
x 64 responses of many steps. Prints tables of means over the last 12 steps, and
the held-out pass@1 at the end. About an hour on 2 cores; runs that are done
only start once more to say so.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BASE = (
  "sampling.n=32 sampling.samples=2048 sampling.in_flight=1024 "
  "sampling.max_new_tokens=5 run.steps=24 eval.every=100 "
  "eval.prompts=30 run.save_every=100"
)
SWITCHES = {
  "as it is": "",
  "no dynamic sampling": "filter.keep=all",
  "keep: partly solved": "filter.keep=solved",
  "whitened by trajectory": "advantage.kind=trajectories",
  "right answers + .1": "advantage.boost=.1",
  "GRPO": "advantage.kind=grpo",
  "group mean": "advantage.kind=centered",
  "leave one out": "advantage.kind=leave_one_out",
  "MaxRL": "advantage.kind=maxrl",
  "clip .02 / .02": "loss.clip_low=.02 loss.clip_high=.02",
  "clip .2 / .4": "loss.clip_high=.4",
  "dual clip 10": "loss.dual_clip=10",
  "GSPO, clip 3e-4 / 4e-4": (
    "loss.kind=gspo loss.clip_low=3e-4 loss.clip_high=4e-4"
  ),
  "GSPO, clip .2 / .28": "loss.kind=gspo",
  "CISPO, clip 1 / 3": "loss.kind=cispo loss.clip_low=1 loss.clip_high=3",
  "REINFORCE": "loss.kind=reinforce",
  "mean over sequences": "loss.mean=sequence",
  "mean over prompts": "loss.mean=prompt",
  "Dr. GRPO": "advantage.kind=centered loss.mean=constant",
  "no KL": "reference.kl_weight=0",
  "KL .1": "reference.kl_weight=.1",
  "KL .1, reset every 4": "reference.kl_weight=.1 reference.reset_every=4",
  "the same with Adam's": (
    "reference.kl_weight=.1 reference.reset_every=4 reference.reset_to=anew"
  ),
  "KL .1, every 4 to the best": (
    "reference.kl_weight=.1 reference.reset_every=4 reference.reset_to=best "
    "eval.every=4 run.save_every=4"
  ),
  "entropy .02": "loss.entropy_weight=.02",
  "no correction": "loss.correction=none",
  "int8 cache, no correction": "sampling.int8_cache=True loss.correction=none",
  "int8 cache, truncated": "sampling.int8_cache=True",
  "int8 cache, banded": "sampling.int8_cache=True loss.correction=banded",
  "int8 cache, sequence": "sampling.int8_cache=True loss.correction=sequence",
  "lr for samples / 512": "optim.lr_samples=512",
}
BASE_OF_LENGTHS = (
  "sampling.n=64 sampling.samples=1024 sampling.in_flight=1024 run.steps=24 "
  "eval.every=100 eval.prompts=30 "
  "run.save_every=100"
)
_CUT = "sampling.max_new_tokens=40"  # many responses are cut then
LENGTHS = {
  "as it is": "",
  "length reward": "reward.length=cosine reward.length_steps=(1,0)",
  "length in place of the reward": (
    "reward.length=replace reward.length_range=(-.5,1) "
    "reward.length_steps=(1,0)"
  ),
  "repetition, 4 tokens, .01": (
    "reward.repeat_penalty=(.01,4) reward.length_steps=(1,0)"
  ),
  "length reward 4 on, 8 off": (
    "reward.length=cosine reward.length_steps=(4,8)"
  ),
  "overlong over the last 80 tokens": (
    "reward.length=overlong reward.length_range=(-1,0) reward.length_buffer=80"
  ),
  "at most 40 tokens": _CUT,
  "the same, cut ones earn 0": f"{_CUT} reward.truncated_factor=0",
  "the same, cut ones masked": f"{_CUT} reward.mask_truncated=True",
  "the same, overlong": (
    f"{_CUT} reward.length=overlong reward.length_range=(-1,0) "
    "reward.length_buffer=20"
  ),
}
TABLES = {"base": (BASE, SWITCHES), "n512": (BASE_OF_LENGTHS, LENGTHS)}
COLUMNS = (  # name, metric, digits
  ("kept", "sampling/pass_rate", 3),
  ("reward", "reward/mean", 3),
  ("KL", "policy/kl_ref", 4),
  ("tokens", "rollout/length_mean", 2),
  ("cut", "rollout/truncated_fraction", 3),
  ("clipped", "policy/clip_fraction", 4),
  ("entropy", "policy/entropy", 2),
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--workdir", type=pathlib.Path, required=True)
  workdir = parser.parse_args().workdir
  names = ["switch", *(name for name, _, _ in COLUMNS), "pass@1"]
  for config, (base, switches) in TABLES.items():
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for number, (name, change) in enumerate(switches.items()):
      folder = workdir / config.partition(":")[0] / f"{number:02}"
      fields = dict(x.split("=", 1) for x in f"{base} {change}".split())
      run(folder, config, fields)
      print(row(name, folder), flush=True)
    print()


def run(folder: pathlib.Path, config: str, fields: dict[str, str]) -> None:
  flags = [f"--config.{field}={value}" for field, value in fields.items()]
  command = [sys.executable, "-m", "brorl_jax.main", f"--workdir={folder}"]
  done = subprocess.run(
    [*command, f"--config={config}", *flags],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  if done.returncode:
    sys.exit(done.stderr.splitlines()[-1])


def row(name: str, folder: pathlib.Path) -> str:
  lines = [
    json.loads(line)
    for line in (folder / "metrics.jsonl").read_text().splitlines()
  ][-12:]
  curve = (folder / "eval" / "curve.jsonl").read_text().splitlines()
  cells = [name]
  for _, metric, digits in COLUMNS:
    values = [line[metric] for line in lines if line[metric] is not None]
    cells.append(f"{statistics.mean(values):.{digits}f}" if values else "")
  return (
    "| "
    + " | ".join([*cells, f"{json.loads(curve[-1])['pass_at_1']:.3f}"])
    + " |"
  )


if __name__ == "__main__":
  main()
