"""A table of judges on a machine without walls."""

from brorl_jax.tasks.sandbox import walls
from brorl_jax.tasks.sandbox.judges import Judge


def preload() -> None:
  def refuse(*_, **__):
    raise OSError("this machine has none")

  walls.raise_walls = refuse


JUDGES = {
  "harmless": Judge(lambda: 1),
  "executing": Judge(lambda: 2, walls=True),
}
