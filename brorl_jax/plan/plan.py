"""Slots and lanes for the memory there is, before anything is compiled."""

import dataclasses
import functools
from collections.abc import Callable

from brorl_jax.many.meshes import ONE, Axes
from brorl_jax.model.policy import Policy
from brorl_jax.plan.memory import Gradient, Load

_WORTH = 1.1  # so many times the work per step is worth fewer slots
_EIGHT = 8  # slots are multiples of it: what matrix units like
_USABLE = 0.9  # of memory; the rest is for what is not counted, and for gaps


class TooLarge(ValueError):
  """What does not fit, by how much, and the nearest that does."""


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
  """How rollouts are decoded, and what a device holds then."""

  slots: int  # rollouts of a prompt that decode together
  lanes: int  # prompts that are decoded together, over all devices
  columns: int  # of a page of the cache, or tokens of a block
  pages: int  # or blocks, of the longest rollout
  stages: dict[str, dict[str, int]]  # what it is doing -> part -> bytes
  limit_bytes: int  # that may be used of a device
  memory_bytes: int  # of a device
  blocks: int = 0  # of a device's pool; 0: pages

  @property
  def stage(self) -> str:
    """When most is needed."""
    return max(self.stages, key=lambda name: sum(self.stages[name].values()))

  @property
  def parts(self) -> dict[str, int]:
    """What is needed then: part -> bytes."""
    return self.stages[self.stage]

  @property
  def total_bytes(self) -> int:
    return sum(self.parts.values())

  def line(self) -> str:
    """The plan in a few words."""
    cache = _count(self.pages, "page")
    if self.blocks:
      cache = _count(self.blocks, "block")
    return (
      f"{_count(self.lanes, 'lane')} x {_count(self.slots, 'slot')}, "
      f"{cache} of {_count(self.columns, 'token')}, "
      f"{size(self.total_bytes)} of {size(self.memory_bytes)} per device"
    )

  def table(self) -> str:
    """Every part with its size and its share of memory."""
    head = f"{self.line()}, most while {self.stage}"
    return "\n".join([head, *shares(self.parts, self.memory_bytes)])


def shares(parts: dict[str, int], memory_bytes: int) -> list[str]:
  """A line for every part, with its size and its share of memory."""
  rows = [*parts.items(), ("together", sum(parts.values()))]
  rows += [("allowed", int(_USABLE * memory_bytes)), ("memory", memory_bytes)]
  wide = max(len(name) for name, _ in rows)
  return [
    f"  {name:{wide}}  {size(n):>11}  {n / memory_bytes:7.2%}"
    for name, n in rows
  ]


def check_probe(probe: Gradient, memory_bytes: int) -> None:
  """Raises TooLarge if an update does not fit while the theorem is measured."""
  limit = int(_USABLE * memory_bytes)
  if probe.need <= limit:
    return
  fits = lambda P: dataclasses.replace(probe, prompts=P).need <= limit
  nearest = _largest(fits, probe.prompts)
  raise TooLarge(
    f"measuring the theorem on theory.prompts = {probe.prompts} with "
    f"{probe.responses} responses of {probe.tokens} tokens needs "
    f"{size(probe.need)} of {size(limit)} ({_USABLE:.0%} of a device) in an "
    "update; "
    + (f"nearest that fits: {nearest}; " if nearest else "")
    + "theory.prompts = 0 leaves it out"
  )


def check_update(update: Gradient, memory_bytes: int) -> None:
  """Raises TooLarge if the gradient of the longest responses does not fit."""
  limit = int(_USABLE * memory_bytes)
  if update.need <= limit:
    return
  within = lambda **sizes: dataclasses.replace(update, **sizes).need <= limit
  nearest = []
  if rows := _largest(lambda M: within(responses=M), update.responses):
    nearest.append(f"optim.rows = {rows}")
  blocks = _largest(lambda k: within(prompts=k * update.axes.rows),
                    update.prompts // update.axes.rows)  # fmt: skip
  if blocks:
    nearest.append(f"optim.blocks = {blocks * update.axes.rows}")
  if T := _largest(lambda T: within(tokens=T), update.tokens):
    nearest.append(f"max_new_tokens = {T}")
  if not nearest:
    few = lambda T: within(responses=1, prompts=update.axes.rows, tokens=T)
    if T := _largest(few, update.tokens):
      nearest.append(
        f"optim.rows = 1 with optim.blocks = {update.axes.rows} and "
        f"max_new_tokens = {T}"
      )
  raise TooLarge(
    f"the gradient of optim.blocks = {update.prompts} with optim.rows = "
    f"{update.responses} responses of {update.tokens} tokens needs "
    f"{size(update.need)} of {size(limit)} ({_USABLE:.0%} of a device); "
    + (_listed(nearest) if nearest else "use more devices, or larger ones")
  )


def rows(update: Gradient, memory_bytes: int) -> int:
  """Responses of a prompt that are read side by side: 8, or as few as fit."""
  limit = int(_USABLE * memory_bytes)
  fits = lambda M: dataclasses.replace(update, responses=M).need <= limit
  return next((M for M in (8, 4, 2) if fits(M)), 1)


def size(n: int) -> str:
  """Bytes in GiB, MiB or KiB."""
  units = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")
  unit, name = next((u for u in units if n >= u[0] / 10), units[-1])
  return f"{n / unit:.2f} {name}"


def _count(n: int, what: str) -> str:
  return f"{n} {what}{'' if n == 1 else 's'}"


def rollouts(
  policy: Policy,
  *,
  memory_bytes: int,
  resident_bytes: int,
  n: int,
  prompts: int,
  prompt_tokens: int,
  max_new_tokens: int,
  axes: Axes = ONE,
  slots: int | None = None,
  lanes: int | None = None,
  cut: bool = False,
  mean_tokens: int = 0,
  streams: bool = False,
) -> RolloutPlan:
  """As many slots in all lanes as fit; of about as many the fewest lanes.

  Args:
    memory_bytes: Of a device.
    resident_bytes: That are on it anyway; those of training among them.
    n: N, rollouts per prompt.
    prompts: P, of all devices.
    prompt_tokens: S, of the longest prompt.
    max_new_tokens: T.
    slots: Rollouts of a prompt that decode together; as many as fit if None.
    lanes: Prompts that are decoded together; as many as fit if None.
    cut: Whether the sampler cuts unlikely tokens, by top-p or top-k.
    mean_tokens: Of a rollout, over a pool. A pool for longer rollouts has room
      for fewer slots; in one for shorter ones some begin again.
    streams: Whether other prompts follow those that are done.

  Raises:
    TooLarge: They do not fit; with the nearest that do.
    ValueError: The policy cannot be spread like this.
  """
  load = Load(
    policy,
    resident_bytes,
    n=n,
    prompts=prompts,
    prompt_tokens=prompt_tokens,
    max_new_tokens=max_new_tokens,
    axes=axes,
    cut=cut,
    mean_tokens=mean_tokens,
    streams=streams,
  )
  limit = int(_USABLE * memory_bytes)
  asked = {"slots": slots, "lanes": lanes}
  slots, lanes = slots and min(slots, n), lanes and min(lanes, prompts)
  chosen = _choose(load, limit, slots, lanes)
  if chosen is None:
    raise TooLarge(_refusal(load, limit, slots, lanes, asked))
  lanes, slots = chosen
  return RolloutPlan(
    slots,
    lanes,
    columns=load.columns,
    pages=load.pages,
    stages=load.stages(lanes, slots),
    limit_bytes=limit,
    memory_bytes=memory_bytes,
    blocks=load.blocks(lanes, slots),
  )


def _largest(fits: Callable[[int], bool], most: int) -> int:
  """Of 1 to `most` the largest that fits, if a smaller one does too; or 0."""
  low, high = 0, most
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle) else (low, middle - 1)
  return low


def _choose(
  load: Load, limit: int, slots: int | None, lanes: int | None
) -> tuple[int, int] | None:
  """Lanes and slots; None if what is given does not fit."""
  rows, best = [slots or load.n], (0, 0)
  if slots is None:
    rows += [*range(-(-load.n // _EIGHT) * _EIGHT - _EIGHT, 0, -_EIGHT)]
    rows += [R for R in (4, 2, 1) if R < rows[-1]]
  for R in rows:
    fits = lambda A, R=R: load.need(A, R) <= limit
    if lanes is not None:
      A = lanes if fits(lanes) else 0
    elif fits(load.prompts):  # may need less than one lane fewer, see W
      A = load.prompts
    else:
      A = _largest(fits, load.prompts - 1)
    if A * R > _WORTH * best[0] * best[1]:
      best = A, R
  return best if best[0] else None


def _refusal(
  load: Load,
  limit: int,
  slots: int | None,
  lanes: int | None,
  asked: dict[str, int | None],
) -> str:
  """What is needed, what there is, and the nearest that fits, in one line."""
  within = lambda load, A=1, R=1: load.need(A, R) <= limit
  A, R = lanes or 1, slots or 1
  what = f"rollouts of {load.n} x {load.max_new_tokens} tokens need"
  there = f"of {size(limit)} ({_USABLE:.0%} of a device)"
  if within(load):
    need = f"{size(load.need(A, R))} {there}"
    given = " and ".join(f"{k} = {v}" for k, v in asked.items() if v)
    near = {
      "slots": _largest(lambda r: within(load, A, r), R),
      "lanes": _largest(lambda a: within(load, a, R), A),
    }
    kept = {"slots": f"lanes = {lanes}", "lanes": f"slots = {slots}"}
    both = slots and lanes
    nearest = [
      f"{k} = {v}" + (f" with {kept[k]}" if both else "")
      for k, v in near.items()
      if asked[k] and v
    ]
    if not nearest:  # neither alone: as many slots as one lane can have
      most = _largest(lambda r: within(load, 1, r), R)
      nearest = [f"slots = {most} with lanes = 1"]
    return f"{what} {need} with {given}; {_listed(nearest)}"
  need = f"{size(load.need(1, 1))} {there} even one slot at a time"
  nearest = _nearest(load, within)
  if nearest:
    return f"{what} {need}; {_listed(nearest)}"
  alone = size(load.resident_bytes + load.weights)
  return (
    f"{what} {need}, not even 1 token of a prompt fits: training state and "
    f"weights alone are {alone}; use more devices, or devices with more memory"
  )


def _listed(nearest: list[str]) -> str:
  return f"nearest that fits: {', or '.join(nearest)}"


def _nearest(load: Load, within: Callable[[Load], bool]) -> list[str]:
  """Changes of one size, each of which would do, the least of its kind.

  If there is none, the longest rollouts of as few prompts as there can be.
  """
  other = functools.partial(dataclasses.replace, load)
  longest = lambda **sizes: _largest(
    lambda T: within(other(max_new_tokens=T, **sizes)), load.max_new_tokens
  )
  changes = []
  if length := longest():
    changes.append(f"max_new_tokens = {length}")
  if load.prompts % load.axes.rows == 0:
    each = lambda k: k * load.axes.rows
    prompts = each(
      _largest(
        lambda k: within(other(prompts=each(k))), load.prompts // load.axes.rows
      )
    )
    if prompts:
      changes.append(
        f"{_count(prompts, 'prompt')} ({prompts * load.n} rollouts) at a time"
      )
  axes, before = load.axes, load.axes.devices
  while load.policy.kv_heads % (tensor := 2 * axes.tensor) == 0:
    axes = dataclasses.replace(axes, fsdp=-1, tensor=tensor).filled(before)
    state = load.resident_bytes * before // axes.devices
    try:
      fits = within(other(axes=axes, resident_bytes=state))
    except ValueError:  # of this policy
      fits = False
    if fits:
      more = "" if axes.devices == before else f" on {axes.devices} devices"
      return [*changes, f"mesh_tensor = {tensor}{more}"]
  least = min(load.axes.rows, load.prompts)
  if not changes and (length := longest(prompts=least)):
    few = f"{_count(least, 'prompt')} ({least * load.n} rollouts) at a time"
    return [f"{few} and max_new_tokens = {length}"]
  return changes
