"""Every program of a run, compiled from shapes alone, and the memory it needs.

No weight is read. Where XLA places outputs, the next program follows it.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from concurrent import futures
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
from brorl_jax.plan.memory import TooLarge, size
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.plan.topology import Topology
from brorl_jax.rollout import programs, sampler, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.programs import Chunks, DecodeInputs, PrefillBatch
from brorl_jax.rollout.slots import DecodeState, ProgramSpec
from brorl_jax.types import Batch, Prompts, Rollouts, State

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
    """That of the phase."""
    return self.phase.config

  @property
  def places(self) -> int:
    """Of one process, see `stream`."""
    return self.phase.memory.rollouts.load.prompts

  @property
  def policy(self) -> Policy:
    return self.run.policy

  @property
  def parameters(self) -> int:
    return sum(x.size for x in jax.tree.leaves(self.policy.shapes))

  @property
  def sampling_bytes(self) -> int:
    held = self.phase.memory.sampling_bytes
    return held + self.sampled_apart * bytes_of(self.state().params)

  @property
  def rows(self) -> int:
    return meshes.of(self.mesh).rows

  @property
  def alone(self) -> "CompileJob":
    """What one process samples, with a copy of the parameters."""
    if self.mesh.size == self.sampling_mesh.size:
      return self
    return dataclasses.replace(
      self, mesh=self.sampling_mesh, sampled_apart=True
    )

  @property
  def read_together(self) -> int:
    return self.rows * stream.prompts_together(
      self.places // self.rows, self.config.data.prompt_tokens
    )

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
    return functools.partial(jax.ShapeDtypeStruct, sharding=place)


def bytes_of(tree: PyTree) -> int:
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
  if job.alone is not job:
    params = job.state().params
    lowered = sharding.copying(params, job.sampling_mesh).lower(params)
    yield Program("copy", lowered, job.sampling_bytes)
  yield from sampling(job.alone, compile)
  if not job.fast:
    yield from evaluating(job.alone, compile)


def training_spec(job: CompileJob) -> ProgramSpec:
  """What the programs of training's rollouts are compiled for."""
  job = job.alone
  cut = SamplingParams(temperature=job.config.sampling.temperature)
  spec = job.phase.memory.rollouts.spec(cut, (0,), job.mesh)
  return spec.program(job.places, streams=True)


def _outputs(
  f: Callable, spec: ProgramSpec, args: tuple, done: jax.stages.Compiled
) -> Any:
  """What a program returns, with the places that the compiler chose."""
  shapes = jax.eval_shape(functools.partial(f, spec), *args)
  return _placed(shapes, done.output_shardings)


def _prompts(job: CompileJob, count: int) -> Prompts:
  rows, shape = _rows(job), (count, job.config.data.prompt_tokens)
  return Prompts(
    rows(shape, jnp.int32), rows(shape, jnp.bool_), rows((count,), jnp.int32)
  )


def _rows(job: CompileJob) -> Callable[..., jax.ShapeDtypeStruct]:
  return job.at(meshes.rows(job.mesh))


def _key(job: CompileJob):
  key = jax.eval_shape(lambda: jax.random.key(0))
  return job.at()(key.shape, key.dtype)


def _cache(
  job: CompileJob, spec: ProgramSpec, compile: Compile
) -> tuple[Any, ...]:
  """The pages of the longest rollouts, or the pool."""
  if spec.blocks:
    made = compile(programs.cache.lower(spec))
    return (_outputs(programs.cache, spec, (), made),)
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
  whole, policy = job.at(), job.phase.memory.rollouts.load.policy
  for layers in FEW if job.fast else (policy.layers,):
    policy = dataclasses.replace(policy, layers=layers)
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
    held = job.sampling_bytes + bytes_of((inputs, pages, state))
    yield Program(name, lowered, held)


def sampling(job: CompileJob, compile: Compile) -> Iterator[Program]:
  """As `stream` runs them."""
  spec = training_spec(job)
  each = job.places // job.rows
  prompts = _prompts(job, job.read_together)
  part = stream.PromptPart(prompts.tokens, prompts.mask, prompts.index)
  args = (job.state().params, part, _key(job))
  opened = functools.partial(stream.open_shelf, each=each)
  lowered = stream.open_shelf.lower(spec, *args, each=each)
  inputs, logits, state, _ = _outputs(opened, spec, args, compile(lowered))
  decoding = _Decoding(inputs, _cache(job, spec, compile), state)
  yield Program("prefill", lowered, job.sampling_bytes + bytes_of(part))
  yield from _decode(job, spec, decoding, "decode")
  held = job.sampling_bytes + bytes_of((decoding, logits))
  weights, prefix, queue = inputs
  read = stream.read_more.lower(spec, weights, logits, prefix, part)
  yield Program("read", read, held + bytes_of(part))
  rows = _rows(job)
  count = (max(each // stream.SHARE, 1) * job.rows,)  # admitted together
  at = rows(count, jnp.int32)
  chunks = Chunks(at, at, rows(count, jnp.bool_), at)
  admit = stream._admit.lower(spec, logits, queue, state, chunks, at, _key(job))
  yield Program("admit", admit, held + bytes_of(chunks))
  lanes, slots = sampler.compact_sizes(
    spec.lanes,
    spec.slots,
    prompt=prompts.tokens.shape[1],
    new=spec.max_new_tokens,
    pool=bool(spec.blocks),
  )[:2][-1]
  fewer = dataclasses.replace(spec, lanes=lanes, slots=slots)
  yield Program("compact", programs.resize.lower(fewer, state), held)
  share = job.at()((), jnp.float32)
  yield Program("take", stream._taken.lower(spec, state, at, share), held)


def evaluating(job: CompileJob, compile: Compile) -> Iterator[Program]:
  """As `sampler.rollouts` runs them during training."""
  c, heldout = job.config.eval, job.phase.memory.heldout
  cut = SamplingParams(temperature=c.temperature, top_p=c.top_p)
  places = heldout.load.prompts
  spec = heldout.spec(cut, (0,), job.mesh).program(places)
  rows = _rows(job)
  batch = PrefillBatch(
    _prompts(job, places),
    offset=rows((places,), jnp.int32),
    real=rows((places,), jnp.bool_),
  )
  args = job.state().params, batch, _key(job)
  lowered = programs.start.lower(spec, *args)
  inputs, state, _ = _outputs(programs.start, spec, args, compile(lowered))
  decoding = _Decoding(inputs, _cache(job, spec, compile), state)
  held = job.sampling_bytes
  yield Program("evaluation: prefill", lowered, held + bytes_of(batch))
  yield from _decode(job, spec, decoding, "evaluation: decode")
  finish = programs.finish.lower(spec, decoding.state)
  yield Program("evaluation: finish", finish, held + bytes_of(decoding))


def batch(job: CompileJob, *, scored: bool) -> Batch:
  """Shapes of the longest batch of an update, where it lies."""
  c = job.config
  place = job.at(None, meshes.rows(job.mesh))
  C, P, M = MICROBATCHES, c.optim.blocks, c.optim.rows
  S, T = c.data.prompt_tokens, c.sampling.max_new_tokens
  array = lambda *shape, dtype=jnp.float32: place((C, P, *shape), dtype)
  logp = array(M, T)
  return Batch(
    prompt=array(S, dtype=jnp.int32),
    prompt_mask=array(S, dtype=jnp.bool_),
    response=array(M, T, dtype=jnp.int32),
    mask=array(M, T, dtype=jnp.bool_),
    logp_sampled=logp,
    advantage=array(M),
    weight=array(M),
    used=job.at()((), jnp.int32),
    old=array(M, T, dtype=jnp.bool_) if c.run.max_age else None,
    logp_old=logp if scored and c.optim.minibatches > 1 else None,
    logp_ref=logp if scored and c.reference.kl_weight else None,
  )


def updating(job: CompileJob) -> Iterator[Program]:
  """As the update stage runs them, for the longest responses."""
  c, state = job.config, job.state()
  policy = dataclasses.replace(job.policy, remat=c.devices.remat, mesh=job.mesh)
  logp = policy.response_logp
  plain, scored = batch(job, scored=False), batch(job, scored=True)
  if c.optim.minibatches > 1 or c.reference.kl_weight:
    lowered = update.logp_of.lower(
      state.params, plain, c.sampling.temperature, response_logp=logp
    )
    yield Program("score", lowered, job.sampling_bytes + bytes_of(plain))
  gradients, stats = jax.eval_shape(update.zero_gradient, state.params)
  trained = states.saved(state).params
  sums = (
    _placed(gradients, jax.tree.map(lambda x: x.sharding, trained)),
    jax.tree.map(lambda x: job.at()(x.shape, x.dtype), stats),
  )
  lowered = update._add.lower(
    sums,
    state.params,
    scored,
    response_logp=logp,
    objective=job.phase.objective,
  )
  beside = bytes_of((sums, scored))
  yield Program("gradient", lowered, job.sampling_bytes + beside)
  lowered = update._apply.lower(
    state, sums, np.float32(0), tx=job.phase.tx, watch=_watch(job, policy)
  )
  held = job.phase.memory.applying_bytes + bytes_of(sums)
  yield Program("apply", lowered, held)


def _watch(job: CompileJob, policy: Policy) -> Any:
  """What an update watches of the theorem; None if nothing."""
  c = job.config
  if not c.theory.prompts:
    return None
  P, N = min(c.theory.prompts, c.sampling.prompts), c.sampling.n
  S, T = c.data.prompt_tokens, c.sampling.max_new_tokens
  zeros = lambda *shape, dtype="f4": np.zeros((P, *shape), dtype)
  nothing = theory.probe(
    Prompts(zeros(S, dtype="i4"), zeros(S, dtype="?"), zeros()),
    Rollouts(
      zeros(N, T, dtype="i4"),
      zeros(N, T),
      zeros(N, T, dtype="?"),
      zeros(N, dtype="?"),
      zeros(),
    ),
    zeros(N),
    count=P,
  )
  lean = dataclasses.replace(policy, remat="layer")
  mass = theory.Mass(lean.response_logp, c.sampling.temperature)
  return jax.tree_util.Partial(mass.mean, nothing)


class Needs(NamedTuple):
  """Bytes of a program on a device."""

  name: str
  held_bytes: int  # before it starts: its arguments and all else that is kept
  temp_bytes: int  # for itself
  new_bytes: int  # results that are not written over arguments

  @property
  def peak_bytes(self) -> int:
    return self.held_bytes + self.temp_bytes + self.new_bytes


def compile_all(job: CompileJob, where: Topology) -> list[tuple[Program, Any]]:
  """Compiles every program, two at a time.

  With `job.fast` two programs have the name of each decode loop, of FEW layers;
  raises ValueError if the policy has layers of two kinds or too few.
  """
  policy = job.policy
  if job.fast and (policy.layers <= FEW[1] or policy.sliding):
    raise ValueError(
      f"--fast needs more than {FEW[1]} layers of one kind; the "
      f"policy has {policy.layers}"
      + (", some of which slide" if policy.sliding else "")
      + "; leave --fast out"
    )
  compile = functools.cache(
    lambda lowered: lowered.compile(compiler_options=where.options)
  )
  with futures.ThreadPoolExecutor(2) as pool:
    found = [
      (program, pool.submit(compile, program.lowered))
      for program in every_program(job, compile)
    ]
  return [(program, future.result()) for program, future in found]


def needs(job: CompileJob, every: list[tuple[Program, Any]]) -> list[Needs]:
  """The memory of programs; of a decode loop of FEW layers that of all."""
  out: dict[str, Needs] = {}
  for program, compiled in every:
    memory: Any = compiled.memory_analysis()
    found = Needs(
      program.name,
      program.held_bytes,
      memory.temp_size_in_bytes,
      max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
    )
    if program.name in out:
      both = zip(out[program.name][1:], found[1:], strict=True)
      found = Needs(program.name, *(of_all_layers(job, *n) for n in both))
    out[program.name] = found
  return [*out.values()]


def of_all_layers(job: CompileJob, two: int, three: int) -> int:
  """On the line through a number of two and of three layers; never fewer."""
  return two + max(three - two, 0) * (job.policy.layers - FEW[0])


def show(job: CompileJob, where: Topology) -> None:
  """Prints the memory of a run; raises TooLarge if a program does not fit."""
  found = needs(job, compile_all(job, where))
  print(title(job, where), *table(found, where), sep="\n")
  # Of the training state, over all devices.
  leaves = jax.tree.leaves(states.saved(job.state()))
  saved = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  print(f"checkpoint: {size(saved)}, of {job.mesh.size} devices")
  line = {
    "topology": str(where.name),
    "devices": len(where.devices),
    "pool_bytes": (limit := where.target.memory_bytes),
    "fits": all(m.peak_bytes <= limit for m in found),
    "programs": [{**m._asdict(), "peak_bytes": m.peak_bytes} for m in found],
    "checkpoint_bytes": saved,
    "estimated_bytes": {"gradient": job.phase.memory.update.need},
  }
  print(json.dumps(line))
  _refuse(found, where, job)


def title(job: CompileJob, where: Topology) -> str:
  """What was compiled."""
  layers = f"{job.policy.layers} layers"
  if job.fast:
    layers += f", decode with {' and '.join(map(str, FEW))}, no evaluation"
  return f"programs of {where.name}: mesh ({meshes.of(job.mesh)}), {layers}"


def table(found: list[Needs], where: Topology) -> Iterator[str]:
  """A line for every program, with its share of what XLA may use."""
  limit = where.target.memory_bytes
  yield f"  {'per device':22} {'held':>11} {'itself':>11} {'peak':>11}  of pool"
  for m in found:
    yield (
      f"  {m.name:22} {size(m.held_bytes):>11} "
      f"{size(m.temp_bytes + m.new_bytes):>11} {size(m.peak_bytes):>11} "
      f"{m.peak_bytes / limit:8.1%}"
    )
  yield f"  {'pool':22} {'':23} {size(limit):>11}"


def _refuse(found: list[Needs], where: Topology, job: CompileJob) -> None:
  worst = max(found, key=lambda m: m.peak_bytes)
  limit = where.target.memory_bytes
  if worst.peak_bytes <= limit:
    return
  c = job.config
  field, value = "sampling.slots", job.phase.memory.rollouts.slots
  if worst.name in ("score", "gradient"):
    field, value = "optim.rows", c.optim.rows
  if worst.name == "apply":
    field, value = "theory.prompts", c.theory.prompts
  raise TooLarge(
    f"{worst.name} needs {size(worst.peak_bytes)} of the {size(limit)} that "
    f"XLA may use of a device of {where.name}; lower {field} = {value}, or "
    "choose more or larger devices"
  )
