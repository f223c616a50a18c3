"""What the programs of a run follow from, as shapes with their places."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brorl_jax.config import Config
from brorl_jax.learner import state as states
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.plan.plan import RolloutPlan
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.rollout import program_spec, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.types import State

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]

# Layers of a decode step that --fast compiles: it has every layer's operations
# in a row, and from two on each layer adds the same. All other programs have a
# loop over layers, and take as long to compile with two as with all.
FEW = (2, 3)


class Program(NamedTuple):
  """One program of a run, and what lies on a device beside it."""

  name: str
  lowered: jax.stages.Lowered
  held_bytes: int  # of a device when it starts, its arguments among them
  layers: int  # of the policy it is compiled for


@dataclasses.dataclass(frozen=True)
class Job:
  """What the programs of a phase of a run follow from."""

  run: Run
  phase: Phase
  mesh: Mesh  # of all devices, on which updates run
  own: Mesh  # of one process, on which it samples; the same if there is one
  fast: bool  # see FEW
  sampled_apart: bool = False  # see `alone`

  @property
  def config(self) -> Config:
    """That of the phase, or of one process of many while it samples."""
    c = self.phase.config
    if not self.sampled_apart:
      return c
    in_flight = c.sampling.in_flight // self.run.machine.processes
    sampling = dataclasses.replace(c.sampling, in_flight=in_flight)
    return dataclasses.replace(c, sampling=sampling)

  @property
  def policy(self) -> Policy:
    return self.run.policy

  @property
  def sampling_bytes(self) -> int:
    """What a device holds while it samples."""
    held = self.phase.memory.sampling_bytes
    if not self.sampled_apart:
      return held
    return held + size(self.state().params)

  @property
  def rows(self) -> int:
    """Rows of devices, over which prompts are spread."""
    return meshes.of(self.mesh).rows

  @property
  def processes(self) -> int:
    return self.mesh.size // self.own.size

  @property
  def alone(self) -> "Job":
    """What one process samples, beside the training state, from its copy."""
    if self.processes == 1:
      return self
    return dataclasses.replace(self, mesh=self.own, sampled_apart=True)

  @property
  def parameters(self) -> int:
    """How many numbers the policy has."""
    return sum(x.size for x in jax.tree.leaves(self.policy.shapes))

  @property
  def read_together(self) -> int:
    """Prompts that are read together."""
    each = self.config.sampling.places // self.rows
    return (
      stream.prompts_together(each, self.config.data.prompt_tokens) * self.rows
    )

  @property
  def visited(self) -> int:
    """Prompts that are admitted together."""
    places = self.config.sampling.places
    return max(places // self.rows // stream.SHARE, 1) * self.rows

  def state(self) -> State:
    """Shapes and places of the training state while it is used."""
    _, shapes, places = states.state_places(
      self.policy.shapes,
      self.phase.tx,
      self.mesh,
      keep_reference=self.run.keep_reference,
      offload="nothing",
    )
    return placed(shapes, places)

  def at(
    self, *spec: str | tuple[str, ...] | None
  ) -> Callable[..., jax.ShapeDtypeStruct]:
    """(shape, dtype) -> an array that lies like this."""
    place = NamedSharding(self.mesh, PartitionSpec(*spec))
    return lambda shape, dtype: jax.ShapeDtypeStruct(
      shape, dtype, sharding=place
    )


def size(tree: PyTree) -> int:
  """Bytes on a device of arrays that are described with their places."""
  return sharding.shard_bytes(tree, jax.tree.map(lambda x: x.sharding, tree))


def placed(shapes: PyTree, places: PyTree) -> PyTree:
  put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return jax.tree.map(put, shapes, places)


def training_spec(run: Job) -> ProgramSpec:
  """What the programs of training's rollouts are compiled for."""
  run = run.alone
  c = run.config.sampling
  cut = SamplingParams(temperature=c.temperature)
  fits = run.phase.memory.rollouts
  return spec_of(run, fits, n=c.chunk, places=c.places, cut=cut, streams=True)


def spec_of(
  run: Job,
  fits: RolloutPlan,
  *,
  n: int,
  places: int,
  cut: SamplingParams,
  streams: bool = False,
) -> ProgramSpec:
  """As `stream` and `sampler.rollouts` make it of the same plan."""
  c = run.config.sampling
  return program_spec.of_places(
    run.phase.decoder,
    cut,
    stop_ids=(0,),
    max_new_tokens=c.max_new_tokens,
    places=places,
    lanes=fits.lanes,
    slots=fits.slots,
    blocks=fits.blocks,
    mesh=run.mesh,
    chunk=n,
    streams=streams,
  )
