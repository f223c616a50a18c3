"""A run of configs/n512.py, and then the first table with that run in it.

  python -m launch.wall.first --config=configs/n512.py --workdir=runs/n512

takes the flags of brorl_jax.main, in whose process it stays: a signal that is
meant for the run reaches it.
"""

import pathlib
import runpy
import sys

from absl import flags

from launch.wall import arms, report

STORED = pathlib.Path(__file__).parent / "results.json"


def main() -> None:
  try:
    runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise
  folder = pathlib.Path(flags.FLAGS.workdir[0]).expanduser()
  if report.is_main_job(folder):
    print(*report.with_run(arms.read(STORED), folder), sep="\n")


if __name__ == "__main__":
  sys.exit(main())
