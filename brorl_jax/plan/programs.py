"""Every program of a run, lowered from shapes alone.

Nothing is allocated and no weight is read. Where the compiler chooses how the
outputs of a program are cut, the next program is compiled for that.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brorl_jax.config import Config
from brorl_jax.learner import state as states
from brorl_jax.learner import theory, update
from brorl_jax.learner.packing import MICROBATCHES
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.plan import sizes
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.rollout import programs, sampler, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.programs import Chunks, DecodeInputs, PrefillBatch
from brorl_jax.rollout.slots import DecodeState
from brorl_jax.types import Batch, Prompts, State

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]

# Layers of a decode step that --fast compiles: it has every layer's operations
# in a row, and from two on each layer adds the same. All other programs have a
# loop over layers, and take as long to compile with two as with all.
FEW = (2, 3)


class Program(NamedTuple):
  """One program of a run, and what lies on a device at the same time."""

  name: str
  lowered: jax.stages.Lowered
  held_bytes: int  # of a device when it starts, its arguments among them
  layers: int  # of the policy it is compiled for


@dataclasses.dataclass(frozen=True)
class CompileJob:
  """What the programs of a phase of a run follow from."""

  run: Run
  phase: Phase
  mesh: Mesh  # of all devices, on which updates run
  sampling_mesh: Mesh  # of one process, on which it samples
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
    return held + size(self.state().params) if self.sampled_apart else held

  @property
  def rows(self) -> int:
    """Rows of devices, over which prompts are spread."""
    return meshes.of(self.mesh).rows

  @property
  def processes(self) -> int:
    return self.mesh.size // self.sampling_mesh.size

  @property
  def alone(self) -> "CompileJob":
    """What one process samples, with a copy of the parameters."""
    if self.processes == 1:
      return self
    return dataclasses.replace(
      self, mesh=self.sampling_mesh, sampled_apart=True
    )

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
  def admitted_together(self) -> int:
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
    return _placed(shapes, places)

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


def _placed(shapes: PyTree, places: PyTree) -> PyTree:
  put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return jax.tree.map(put, shapes, places)


def every_program(job: CompileJob, compile: Compile) -> Iterator[Program]:
  """All programs; first those that take longest to compile.

  An evaluation runs the programs of training's rollouts for other prompts: its
  plan knows their memory, so they are not compiled if fast.
  """
  yield from updating(job)
  if job.processes > 1:
    params = job.state().params
    lowered = sharding.copying(params, job.sampling_mesh).lower(params)
    yield Program("copy", lowered, job.sampling_bytes, job.policy.layers)
  yield from sampling(job.alone, compile)
  if not job.fast:
    yield from evaluating(job.alone, compile)


def counts(job: CompileJob) -> dict[str, int]:
  """How many programs a run compiles: part -> number, at most."""
  c = job.config
  spec = training_spec(job)
  # Each size of lanes with each of slots: both may shrink alone.
  pool = bool(spec.blocks)
  shrunk = len(sampler.compact_sizes(spec.lanes, spec.slots, pool=pool))
  shrunk = 1 if spec.pages == 1 else shrunk
  # And its compaction; over pages an empty page, and one for other slots.
  decoding = shrunk + (shrunk - 1) + (0 if spec.blocks else 2 * shrunk - 1)
  scores = c.optim.minibatches > 1 or bool(c.reference.kl_weight)
  return {
    # Prefill, read, admit, take; with several processes the copy.
    "sampling": 4 + decoding + (job.processes > 1),
    "updating": job.phase.layout.shapes * (1 + scores) + 2,
    "evaluation": 2 + decoding,
  }


def training_spec(job: CompileJob) -> ProgramSpec:
  """What the programs of training's rollouts are compiled for."""
  job = job.alone
  cut = SamplingParams(temperature=job.config.sampling.temperature)
  spec = job.phase.memory.rollouts.spec(cut, (0,), job.mesh)
  return spec.program(job.config.sampling.places, streams=True)


def _outputs(
  f: Callable, spec: ProgramSpec, args: tuple, done: jax.stages.Compiled
) -> Any:
  """What a program returns, with the places that the compiler chose."""
  shapes = jax.eval_shape(functools.partial(f, spec), *args)
  return _placed(shapes, done.output_shardings)


def _prompts(job: CompileJob, count: int) -> Prompts:
  rows, S = job.at(meshes.rows(job.mesh)), job.config.data.prompt_tokens
  return Prompts(
    rows((count, S), jnp.int32),
    rows((count, S), jnp.bool_),
    rows((count,), jnp.int32),
  )


def _key(job: CompileJob):
  key = jax.eval_shape(lambda: jax.random.key(0))
  return job.at()(key.shape, key.dtype)


def _cache(
  job: CompileJob, spec: ProgramSpec, compile: Compile
) -> tuple[Any, ...]:
  """The pages of the longest rollouts, or the pool."""
  if spec.blocks:
    made = compile(programs.pool.lower(spec))
    return (_outputs(programs.pool, spec, (), made),)
  rows = spec.lanes * spec.slots * job.rows
  page = jax.eval_shape(lambda: spec.policy.page(rows, spec.columns))
  heads = job.at(meshes.rows(job.mesh), "tensor")
  return (jax.tree.map(lambda x: heads(x.shape, x.dtype), page),) * spec.pages


class _Decoding(NamedTuple):
  """Between two programs of the sampler, as shapes."""

  inputs: DecodeInputs
  pages: tuple[Any, ...]
  state: DecodeState

  def of_first(self, layers: int) -> "_Decoding":
    """The same for a policy of the first layers."""
    weights, prefix, queue = self.inputs
    cut = lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], layers, *x.shape[2:]), x.dtype, sharding=x.sharding
    )
    prefix = dataclasses.replace(prefix, k=cut(prefix.k), v=cut(prefix.v))
    weights = weights | {"blocks": weights["blocks"][:layers]}
    pages = tuple(page[:layers] for page in self.pages)
    return _Decoding(DecodeInputs(weights, prefix, queue), pages, self.state)


def _decode(
  job: CompileJob, spec: ProgramSpec, decoding: _Decoding, name: str
) -> Iterator[Program]:
  """The decode loop, over as many pages as there can be."""
  whole = job.at()
  for layers in FEW if job.fast else (job.policy.layers,):
    policy = dataclasses.replace(job.policy, layers=layers)
    policy = sizes.decoder(job.config, policy)
    inputs, pages, state = decoding.of_first(layers)
    lowered = programs.segment.lower(
      dataclasses.replace(spec, policy=policy),
      inputs,
      pages[:-1],
      whole((), jnp.int32),
      pages[-1],
      state,
      whole((), jnp.bool_),
      whole((), jnp.int32),
    )
    held = job.sampling_bytes + size((inputs, pages, state))
    yield Program(name, lowered, held, layers)


def sampling(job: CompileJob, compile: Compile) -> Iterator[Program]:
  """As `stream` runs them."""
  spec = training_spec(job)
  each = job.config.sampling.places // job.rows
  prompts = _prompts(job, job.read_together)
  part = stream.PromptPart(prompts.tokens, prompts.mask, prompts.index)
  args = (job.state().params, part, _key(job))
  opened = functools.partial(stream.open_shelf, each=each)
  lowered = stream.open_shelf.lower(spec, *args, each=each)
  inputs, logits, state, _ = _outputs(opened, spec, args, compile(lowered))
  decoding = _Decoding(inputs, _cache(job, spec, compile), state)
  before = job.sampling_bytes + size(part)
  yield Program("prefill", lowered, before, job.policy.layers)
  yield from _decode(job, spec, decoding, "decode")
  held = job.sampling_bytes + size((decoding, logits))
  program = lambda name, lowered, more=0: Program(
    name, lowered, held + more, job.policy.layers
  )
  weights, prefix, queue = inputs
  read = stream.read_more.lower(spec, weights, logits, prefix, part)
  yield program("read", read, size(part))
  rows, count = job.at(meshes.rows(job.mesh)), (job.admitted_together,)
  at = rows(count, jnp.int32)
  chunks = Chunks(at, at, rows(count, jnp.bool_), at)
  admit = stream._admit.lower(spec, logits, queue, state, chunks, at, _key(job))
  yield program("admit", admit, size(chunks))
  lanes, slots = sampler.compact_sizes(
    spec.lanes, spec.slots, pool=bool(spec.blocks)
  )[:2][-1]
  fewer = dataclasses.replace(spec, lanes=lanes, slots=slots)
  yield program("compact", programs.resize.lower(fewer, state))
  share = job.at()((), jnp.float32)
  yield program("take", stream._taken.lower(spec, state, at, share))


def evaluating(job: CompileJob, compile: Compile) -> Iterator[Program]:
  """As `sampler.rollouts` runs them during training."""
  c, heldout = job.config.eval, job.phase.memory.heldout
  cut = SamplingParams(temperature=c.temperature, top_p=c.top_p)
  places = heldout.prompts
  spec = heldout.plan.spec(cut, (0,), job.mesh).program(places)
  rows = job.at(meshes.rows(job.mesh))
  batch = PrefillBatch(
    _prompts(job, places),
    offset=rows((places,), jnp.int32),
    real=rows((places,), jnp.bool_),
  )
  args = job.state().params, batch, _key(job)
  lowered = programs.start.lower(spec, *args)
  inputs, state, _ = _outputs(programs.start, spec, args, compile(lowered))
  decoding = _Decoding(inputs, _cache(job, spec, compile), state)
  held, layers = job.sampling_bytes, job.policy.layers
  yield Program("evaluation: prefill", lowered, held + size(batch), layers)
  yield from _decode(job, spec, decoding, "evaluation: decode")
  finish = programs.finish.lower(spec, decoding.state)
  yield Program("evaluation: finish", finish, held + size(decoding), layers)


def batch(job: CompileJob, *, scored: bool) -> Batch:
  """Shapes of the longest batch of an update, where it lies."""
  c = job.config
  place = job.at(None, meshes.rows(job.mesh))
  C, P, M = MICROBATCHES, c.optim.blocks, c.optim.rows
  S, T = c.data.prompt_tokens, c.sampling.max_new_tokens
  array = lambda *shape, dtype=jnp.float32: place((C, P, *shape), dtype)
  logp = array(M, T)
  second = scored and c.optim.minibatches > 1
  return Batch(
    prompt=array(S, dtype=jnp.int32),
    prompt_mask=array(S, dtype=jnp.bool_),
    response=array(M, T, dtype=jnp.int32),
    mask=array(M, T, dtype=jnp.bool_),
    logp_sampled=logp,
    advantage=array(M),
    weight=array(M),
    used=job.at()((), jnp.int32),
    logp_old=logp if second else None,
    logp_ref=logp if scored and c.reference.kl_weight else None,
  )


def updating(job: CompileJob) -> Iterator[Program]:
  """As the update stage runs them, for the longest responses."""
  c, state = job.config, job.state()
  policy = dataclasses.replace(job.policy, remat=c.devices.remat, mesh=job.mesh)
  logp = policy.response_logp
  plain, scored = batch(job, scored=False), batch(job, scored=True)
  program = functools.partial(Program, layers=job.policy.layers)
  if c.optim.minibatches > 1 or c.reference.kl_weight:
    lowered = update.logp_of.lower(
      state.params, plain, c.sampling.temperature, response_logp=logp
    )
    yield program("score", lowered, job.sampling_bytes + size(plain))
  sums = _sums(job, state)
  lowered = update._add.lower(
    sums,
    state.params,
    scored,
    response_logp=logp,
    objective=job.phase.objective,
  )
  yield program("gradient", lowered, job.sampling_bytes + size((sums, scored)))
  lowered = update._apply.lower(
    state, sums, np.float32(0), tx=job.phase.tx, watch=_watch(job, policy)
  )
  yield program("apply", lowered, job.phase.memory.applying_bytes + size(sums))


def _sums(job: CompileJob, state: State) -> PyTree:
  """The sums of gradients, which lie as the parameters, and of statistics."""
  gradients, stats = jax.eval_shape(update.zero_gradient, state.params)
  places = jax.tree.map(lambda x: x.sharding, state.params)
  whole = job.at()
  return (
    _placed(gradients, places),
    jax.tree.map(lambda x: whole(x.shape, x.dtype), stats),
  )


def _watch(job: CompileJob, policy: Policy) -> Any:
  """What an update watches of the theorem; None if nothing."""
  c = job.config
  if not c.theory.prompts:
    return None
  P, M, N = c.theory.prompts, theory.RESPONSES, c.sampling.n
  P = min(P, c.sampling.prompts)
  S = c.data.prompt_tokens
  T = min(theory.TOKENS, c.sampling.max_new_tokens)
  array = lambda dtype, *shape: np.zeros(shape, dtype)
  probe = theory.Probe(
    prompt=array(np.int32, P, S),
    prompt_mask=array(bool, P, S),
    response=array(np.int32, P, M, T),
    mask=array(bool, P, M, T),
    probability=array(np.float32, P, M),
    correct=array(bool, P, M),
    sampled=array(np.float32, P, N),
    sampled_correct=array(bool, P, N),
    unsampled=array(np.float32, P),
    draws=array(np.float32, P),
  )
  lean = dataclasses.replace(policy, remat="layer")
  mass = theory.Mass(lean.response_logp, c.sampling.temperature)
  return jax.tree_util.Partial(mass.mean, probe)
