"""What each part of the recipe does to a short run: one row per switch.

  python launch/switches.py --workdir=runs/switches

Every run is the first of the list with one thing changed, from the same seed:
24 steps of 64 prompts x 32 rollouts of the embedded policy. Prints a table of
means over the last 12 steps, and the held-out pass@1 at the end. About half an
hour on 2 cores; runs that are done only start once more to say so.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from brorl_jax.runs import sections

ROOT = pathlib.Path(__file__).parents[1]
BASE = (
  "n=32 samples=2048 in_flight=1024 max_new_tokens=5 steps=24 eval_every=100 "
  "eval_prompts=30 save_every=100"
)
SWITCHES = {
  "as it is": "",
  "no dynamic sampling": "keep=all",
  "keep: partly solved": "keep=solved",
  "band .1 to .9": "keep_above=.1 keep_below=.9",
  "1,024 prompts": "distinct_prompts=1024",
  "1,024 prompts, some rest": "distinct_prompts=1024 rest_after=1 rest_steps=5",
  "whitened by trajectory": "advantage=trajectories",
  "GRPO": "advantage=grpo",
  "group mean": "advantage=centered",
  "leave one out": "advantage=leave_one_out",
  "MaxRL": "advantage=maxrl",
  "credit by answer": "credit=distinct",
  "clip .02 / .02": "clip_low=.02 clip_high=.02",
  "clip .2 / .4": "clip_high=.4",
  "dual clip 1.05": "dual_clip=1.05",
  "GSPO, clip 3e-4 / 4e-4": "loss=gspo clip_low=3e-4 clip_high=4e-4",
  "GSPO, clip .2 / .28": "loss=gspo",
  "CISPO, clip 1 / 3": "loss=cispo clip_low=1 clip_high=3",
  "REINFORCE": "loss=reinforce",
  "mean over sequences": "mean=sequence",
  "mean over prompts": "mean=prompt",
  "Dr. GRPO": "advantage=centered mean=constant",
  "no KL": "kl_weight=0",
  "KL .1": "kl_weight=.1",
  "KL .1, reset above .02": "kl_weight=.1 reset_above_kl=.02",
  "KL .1, reset every 4": "kl_weight=.1 reset_every=4",
  "the same with Adam's": "kl_weight=.1 reset_every=4 reset_optimizer=True",
  "entropy .02": "entropy_weight=.02",
  "no correction": "correction=none",
  "int8 cache, no correction": "int8_cache=True correction=none",
  "int8 cache, truncated": "int8_cache=True",
  "int8 cache, banded": "int8_cache=True correction=banded",
  "int8 cache, sequence": "int8_cache=True correction=sequence",
  "pipeline": "pipeline=True",
  "length reward": "length_weight=1 length_on=24",
  "length reward, wrong too": "length_weight=1 length_on=24 length_wrong=True",
  "length reward 4 on, 8 off": "length_weight=1 length_on=4 length_off=8",
  "overlong over the last 3 tokens": "overlong_weight=1 overlong_buffer=3",
  "lr for samples / 512": "lr_scaling=samples lr_base=512",
  # Many responses are cut then.
  "at most 2 tokens": "max_new_tokens=2",
  "the same, cut ones earn 0": "max_new_tokens=2 truncated_factor=0",
  "the same, cut ones masked": "max_new_tokens=2 mask_truncated=True",
  "the same, overlong": "max_new_tokens=2 overlong_weight=1 overlong_buffer=1",
}
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
  print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
  for number, (name, change) in enumerate(SWITCHES.items()):
    folder = workdir / f"{number:02}"
    run(folder, dict(x.split("=", 1) for x in f"{BASE} {change}".split()))
    print(row(name, folder), flush=True)


def run(folder: pathlib.Path, fields: dict[str, str]) -> None:
  flags = [
    f"--config.{sections.RENAMED[field]}={value}"
    for field, value in fields.items()
  ]
  command = [sys.executable, "-m", "brorl_jax.main", f"--workdir={folder}"]
  done = subprocess.run(
    [*command, "--config=configs/base.py", *flags],
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
