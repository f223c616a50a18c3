"""What sampler programs are compiled for: decoder, shapes and mesh.

Keys and values of responses have one of two forms. On a CPU they lie in pages,
whose column all slots write in lock-step; on accelerators in blocks of a pool,
which a slot takes as its rollout grows. The decoder says which.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from brorl_jax.many import meshes
from brorl_jax.rollout.draw import SamplingParams

# A page has at least 64 columns, and a rollout at most 8 pages. Each number of
# pages is one more program to compile (1.5 CPU-s for 6 layers of width 256).
# With 8 pages attention reads at most 1/8 of the limit more than it must.
_LEAST_COLUMNS = 64
_MOST_PAGES = 8
# K, steps between two looks at whether the loop over a pool should end. A GPU's
# host reads that condition in every turn and launches nothing meanwhile. Rows
# that end in between idle for 8 steps on average, of thousands.
_UNCHECKED = 16


@runtime_checkable
class Decoder(Protocol):
  """What the sampler needs from a policy: pure functions of a hashable object.

  `prefill` and the steps read what `unroll` made of the cast parameters. Leaves
  of a prefix have axes [P,...]. Leaves of a page have axes [A R,...], and of a
  pool [blocks,...]. `pool_columns` is 0 if it decodes over pages.
  """

  @property
  def vocab(self) -> int: ...
  @property
  def pool_columns(self) -> int: ...
  def cast(self, params) -> PyTree: ...
  def unroll(self, params) -> PyTree: ...
  def prefill(self, params, tokens, mask) -> tuple[Array, Any]: ...
  def lane_prompts(self, prefix, window) -> Any: ...
  def page(self, rows, columns) -> Any: ...
  def decode_step(
    self, weights, shared, pages, token, length, which, column, used
  ) -> tuple[Array, Any]: ...
  def pool(self, blocks, columns) -> Any: ...
  def pool_step(
    self, weights, shared, pools, token, length, which, table, goes
  ) -> tuple[Array, Any]: ...


def page_columns(max_new_tokens: int) -> int:
  """C, columns of a page: a multiple of 64, or T if that is smaller."""
  least = -(-max_new_tokens // _MOST_PAGES)
  return min(-(-least // _LEAST_COLUMNS) * _LEAST_COLUMNS, max_new_tokens)


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
  """The static arguments of every program of one sampling call.

  Dimensions: A lanes of R slots on each device, N rollouts of at most T tokens
  per place, pages or blocks of C columns.

  Raises:
    ValueError: The pool has no room for one longest rollout.
  """

  policy: Decoder
  sampling: SamplingParams
  stop_ids: tuple[int, ...]
  # N, rollouts of a prompt that are made in one place: all n of it, or fewer if
  # it gets them in rounds or on several devices.
  chunk: int
  max_new_tokens: int  # T
  lanes: int  # A, lanes of one device
  slots: int  # R, slots of one lane
  columns: int  # C, columns of a page, or tokens of a block
  mesh: Mesh | None
  # Whether more prompts may arrive. The decode loop then also ends when enough
  # lanes have no prompt left.
  streams: bool = False
  blocks: int = 0  # of a device's pool; 0: pages
  unchecked: int = 1  # K, steps between two looks at the loop's condition

  def __post_init__(self):
    if 0 < self.blocks < self.pages:
      raise ValueError(
        f"blocks = {self.blocks} must be at least {self.pages}, which one "
        f"rollout of {self.max_new_tokens} tokens needs"
      )

  @property
  def pages(self) -> int:
    """Pages, or blocks, of the longest rollout."""
    return -(-self.max_new_tokens // self.columns)

  @property
  def turns(self) -> bool:
    """Whether a page may be full. A single one is reused in a circle."""
    return self.pages > 1 and not self.blocks

  def ended(self, token: Int[Array, "*axes"]) -> Bool[Array, "*axes"]:
    """Whether each token is a stop id."""
    return jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSpec:
  """What is sampled, and how much of it decodes together."""

  policy: Decoder
  sampling: SamplingParams
  stop_ids: tuple[int, ...]  # a rollout ends with the first of these tokens
  n: int  # N, rollouts of a prompt, or of a chunk of it
  max_new_tokens: int  # T
  slots: int  # R, rollouts of a prompt that decode together, at most N
  lanes: int | None = None  # prompts that decode together; all if None
  # Of each device's pool; None: enough for the longest rollouts in all slots.
  blocks: int | None = None
  mesh: Mesh | None = None  # from `meshes`; one device if None

  @property
  def devices(self) -> int:
    """Rows of devices, each of which has prompts of its own."""
    return meshes.of(self.mesh).rows

  def program(
    self, places: int, *, parts: int = 1, streams: bool = False
  ) -> ProgramSpec:
    """The programs of a device, for places of prompts on all devices.

    The rollouts of a prompt are cut into `parts`, each with a place.
    """
    lanes = places if self.lanes is None else self.lanes * parts
    spec = ProgramSpec(
      self.policy,
      self.sampling,
      self.stop_ids,
      chunk=self.n // parts,
      max_new_tokens=self.max_new_tokens,
      lanes=min(-(-lanes // self.devices), places // self.devices),
      slots=-(-self.slots // parts),
      columns=page_columns(self.max_new_tokens),
      mesh=self.mesh,
      streams=streams,
    )
    if not self.policy.pool_columns:
      return spec
    spec = dataclasses.replace(
      spec, columns=self.policy.pool_columns, unchecked=_UNCHECKED
    )
    blocks = self.blocks
    if blocks is None:
      blocks = spec.lanes * spec.slots * spec.pages
    return dataclasses.replace(spec, blocks=blocks)


# On every row of devices in full, or cut along the first axis over all rows.
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(meshes.ROWS)


def on_devices(
  spec: ProgramSpec, f: Callable, in_specs: Any, out_specs: Any
) -> Callable:
  """`f`, run separately by each row of devices.

  No row waits for another inside a program. Heads and vocabulary may still be
  sharded within a row, by the compiler.
  """
  if spec.mesh is None:
    return f
  here = PartitionSpec(meshes.rows(spec.mesh))
  written = functools.partial(
    jax.tree.map,
    lambda place: here if place == SPLIT else place,
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )
  return jax.shard_map(
    f,
    mesh=spec.mesh,
    in_specs=written(in_specs),
    out_specs=written(out_specs),
    axis_names={*meshes.ROWS},
    # The check would refuse a loop whose state starts equal on all devices and
    # then differs.
    check_vma=False,
  )
