"""Makes an embedded policy.

  python -m launch.embedded steps --workdir=steps
  python -m launch.embedded at_once --workdir=at_once

Deterministic: the same code and seed give the same files on the same kind of
machine.
"""

import argparse
import pathlib
import sys

from brorl_jax.errors import UserError
from launch.embedded import recipes, teacher


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("recipe", choices=[*recipes.RECIPES])
  parser.add_argument("--workdir", type=pathlib.Path, required=True)
  parser.add_argument("--seed", type=int, default=0, help="0 to 2**29 - 1")
  flags = parser.parse_args()
  if not 0 <= flags.seed < 2**29:
    parser.error(f"--seed={flags.seed} must be 0 to 2**29 - 1")
  try:
    teacher.teach(recipes.RECIPES[flags.recipe], flags.workdir, seed=flags.seed)
  except (UserError, ValueError) as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  main()
