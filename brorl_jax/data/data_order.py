"""The example of each prompt of a run: a pure function of its index.

    order = Order({"math": 40_000, "gym": None}, {"math": 3, "gym": 1}, seed=0)
    order[5]  # ("math", 31017)

Prompt i is looked up, not reached by iteration. A run can therefore resume
anywhere with the same prompts, and n hosts that take i = h mod n together see
what one host sees. grain makes the order; `fingerprint` holds what affects it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import cast

import grain

_UNBOUNDED = 2**44  # gym.puzzle takes indexes below this
_PINNED = 64  # prompts whose order is in the fingerprint


class Order:
  """The order of a run's prompts over several sources.

  A source is shuffled again after each pass. The sources are interleaved so
  that every range of prompts has them in proportion to their weights.
  """

  def __init__(
    self,
    sizes: Mapping[str, int | None],
    weights: Mapping[str, float | int],
    *,
    seed: int,
  ):
    """Draws nothing yet.

    `sizes` has the number of examples of each source; None for a generator,
    whose elements are 0, 1, 2... `weights` has its relative share among the
    prompts, which grain rounds: it may be off by 1 % of itself.
    """
    for name, size in sizes.items():
      # Grain shuffles with 32-bit numbers.
      if size is not None and not 1 <= size < 2**31:
        raise ValueError(f"source {name!r} has {size} examples; 1 to 2**31 - 1")
    # Sorted, so that the order of a config's lines does not matter.
    drawn = sorted(name for name in sizes if weights[name] > 0)
    if not drawn:
      names = ", ".join(sorted(sizes)) or "(none)"
      why = "no weight is positive; set at least one"
      raise ValueError(f"sources {names}: {why}")
    self._sizes, self._weights, self._seed = sizes, weights, seed
    sources = [_source(name, sizes[name], seed) for name in drawn]
    shares = [float(weights[name]) for name in drawn]
    self._mixed = grain.MapDataset.mix(sources, shares)

  def __getitem__(self, i: int) -> tuple[str, int]:
    """Source and element of prompt i, for any i >= 0."""
    return cast(tuple[str, int], self._mixed[i])

  def fingerprint(self, data: Mapping[str, str]) -> dict[str, str]:
    """What affects the order and its examples, for `refuse_changes`.

    `data` has a digest of each source's examples, or of its generator.
    """
    first = json.dumps([self[i] for i in range(_PINNED)]).encode()
    amount = lambda n: "unbounded" if n is None else f"{n} examples"
    out = {"seed": str(self._seed)}
    for name, size in sorted(self._sizes.items()):
      weight = f"weight {float(self._weights[name])!r}"
      out[f"source {name}"] = f"{amount(size)}, {weight}, digest {data[name]}"
    # Changes if a version of grain shuffles or mixes differently.
    return {**out, "order": hashlib.blake2b(first, digest_size=8).hexdigest()}


def refuse_changes(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
  """Raises ValueError with the first difference of data, and both values."""
  # Causes first: the order follows from the rest.
  for name in sorted({*stored, *now}, key=lambda n: (n == "order", n)):
    was, is_ = stored.get(name, "missing"), now.get(name, "missing")
    if was != is_:
      how = f"{name} was {was}, now it is {is_}"
      must = "restore it, or choose another workdir"
      raise ValueError(f"the run's data has changed: {how}; {must}")


def _source(name: str, size: int | None, seed: int) -> grain.MapDataset:
  numbers = grain.MapDataset.range(size or _UNBOUNDED)
  if size is not None:
    # Each source has its own seed: equal seeds would give sources of one size
    # the same order, and adjacent ones would share epochs (epoch e: own + e).
    own = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    numbers = numbers.shuffle(seed=int.from_bytes(own, "little"))
  return numbers.repeat().map(lambda element: (name, element))
