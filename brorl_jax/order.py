"""Which example each prompt of a run is: a pure function of its number.

    order = Order({"math": 40_000, "gym": None}, {"math": 3, "gym": 1}, seed=0)
    order[5]  # ("math", 31017)

Prompt i is looked up, not reached by iteration, so a run that resumes anywhere
goes on exactly, and n hosts that take i = h mod n see together what one host
sees. The order is grain's; what would change it is in `fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import cast

import grain

_UNBOUNDED = 2**44  # gym.puzzle takes indexes below this
_PINNED = 64  # prompts whose order the fingerprint holds


class Order:
  """The order of a run's prompts over several sources.

  Every source is shuffled anew each time that it has been gone through, and
  the sources are interleaved so that any stretch of prompts has them by
  weight, not only the whole.
  """

  def __init__(
    self,
    sizes: Mapping[str, int | None],
    weights: Mapping[str, float | int],
    *,
    seed: int,
  ):
    """Args are checked; nothing is drawn yet.

    Args:
      sizes: How many examples each source has; None for one that makes them
        as it goes, whose elements are then 0, 1, 2...
      weights: Relative share of each source among the prompts; a source of
        weight 0 is never drawn. Grain rounds them: a share may be off by
        1 % of itself.
      seed: Any number >= 0.

    Raises:
      ValueError: Naming the source, if a size or weight is out of range, a
        source has only one of them, or no weight is positive.
    """
    if seed < 0:
      raise ValueError(f"seed is {seed}; use a number >= 0")
    for name in {*sizes, *weights}:
      _refuse_source(name, sizes, weights)
    # Sorted, so that the order of a config's lines does not matter.
    drawn = sorted(name for name in sizes if weights[name] > 0)
    if not drawn:
      raise ValueError(
        f"no weight of {', '.join(sorted(sizes)) or 'no source'} is positive;"
        " at least one must be"
      )
    self._sizes, self._weights, self._seed = sizes, weights, seed
    self._mixed = grain.MapDataset.mix(
      [_source(name, sizes[name], seed) for name in drawn],
      [float(weights[name]) for name in drawn],
    )

  def __getitem__(self, i: int) -> tuple[str, int]:
    """Source and element of prompt i, for any i >= 0."""
    if i < 0:
      raise IndexError(f"prompt {i}: prompts count from 0")
    return cast(tuple[str, int], self._mixed[i])

  def fingerprint(self, data: Mapping[str, str]) -> dict[str, str]:
    """What the order and its examples depend on, to be stored with a run.

    Args:
      data: A digest of each source's examples, or of what makes them.

    Returns:
      Names with what they must be equal to, for `refuse_changes`.
    """
    first = [self[i] for i in range(_PINNED)]
    return {
      "seed": str(self._seed),
      **{
        f"source {name}": f"{_amount(size)}, weight"
        f" {float(self._weights[name])!r}, digest {data[name]}"
        for name, size in sorted(self._sizes.items())
      },
      # Changes with a grain that shuffles or mixes in another way.
      "order": hashlib.blake2b(
        json.dumps(first).encode(), digest_size=8
      ).hexdigest(),
    }


def refuse_changes(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
  """Refuses to go on with data other than the run's.

  Args:
    stored: The fingerprint that the run was started with.
    now: The present one.

  Raises:
    ValueError: Naming the first thing that differs, and what it was.
  """
  # What has changed before what follows from it.
  for name in sorted({*stored, *now}, key=lambda n: (n == "order", n)):
    was, is_ = stored.get(name, "not there"), now.get(name, "not there")
    if was != is_:
      raise ValueError(
        f"the run's data has changed: {name} was {was}, is {is_}; give it back"
        " as it was, or choose another workdir"
      )


def _amount(size: int | None) -> str:
  return "unbounded" if size is None else f"{size} examples"


def _source(name: str, size: int | None, seed: int) -> grain.MapDataset:
  numbers = grain.MapDataset.range(size or _UNBOUNDED)
  if size is not None:
    # A seed of its own: equal ones would shuffle sources of one size alike.
    # Epoch e is shuffled by own + e, so neighbours would share epochs, too.
    own = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    numbers = numbers.shuffle(seed=int.from_bytes(own, "little"))
  return numbers.repeat().map(lambda element: (name, element))


def _refuse_source(
  name: str, sizes: Mapping[str, int | None], weights: Mapping[str, float | int]
) -> None:
  if name not in weights or name not in sizes:
    missing = "weight" if name not in weights else "size"
    raise ValueError(f"source {name!r} has no {missing}; give it one")
  size, weight = sizes[name], weights[name]
  # Grain shuffles with 32-bit numbers.
  if size is not None and not 1 <= size < 2**31:
    raise ValueError(f"source {name!r} has {size} examples; use 1 to 2**31 - 1")
  if not (math.isfinite(weight) and weight >= 0):
    raise ValueError(
      f"source {name!r} has weight {weight}; use a finite number >= 0"
    )
