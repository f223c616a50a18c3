"""Every program of a run, compiled from shapes alone.

Nothing is allocated and no weight is read. Where the compiler chooses how the
outputs of a program are cut, the next program is compiled for that.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brorl_jax.learner import packing, theory, update
from brorl_jax.learner import state as states
from brorl_jax.main.stages import learning, sampling
from brorl_jax.model.policy import Policy
from brorl_jax.rollout import program_spec, programs, sampler, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.plan import RolloutPlan
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.programs import DecodeInputs, PrefillBatch
from brorl_jax.rollout.slots import DecodeState
from brorl_jax.runs.sections import Config
from brorl_jax.types import Batch, Prompts, State

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
class Run:
  """What the programs of a run follow from."""

  config: Config
  policy: Policy
  mesh: Mesh
  rollouts: RolloutPlan
  evaluations: RolloutPlan
  chunk: int  # held-out prompts that are sampled together
  keep_reference: bool
  sampling_bytes: int  # training state of a device while it samples
  applying_bytes: int  # and while an update is applied
  fast: bool  # see FEW

  @property
  def data(self) -> int:
    """Devices over which prompts are spread."""
    return self.mesh.shape["data"]

  @property
  def parameters(self) -> int:
    """How many numbers the policy has."""
    shapes = jax.eval_shape(self.policy.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))

  @property
  def visited(self) -> int:
    """Prompts that are admitted together."""
    places = self.config.sampling.places
    return max(places // self.data // stream.SHARE, 1) * self.data

  def spec(self) -> ProgramSpec:
    """Of training's rollouts."""
    c = self.config.sampling
    cut = SamplingParams(temperature=c.temperature)
    spec = _spec(self, self.rollouts, n=c.n, places=c.places, cut=cut)
    return dataclasses.replace(spec, streams=True)

  @property
  def tx(self):
    """The optimizer."""
    return learning.optimizer(self.config.optim, self.config.sampling)[0]

  def state(self) -> State:
    """Shapes and places of the training state while it is used."""
    _, shapes, places = states.state_places(
      jax.eval_shape(self.policy.init, jax.random.key(0)),
      self.tx,
      self.mesh,
      keep_reference=self.keep_reference,
      offload="nothing",
    )
    return _placed(shapes, places)

  def at(self, *spec: str | None) -> Callable[..., jax.ShapeDtypeStruct]:
    """(shape, dtype) -> an array that lies like this."""
    place = NamedSharding(self.mesh, PartitionSpec(*spec))
    return lambda shape, dtype: jax.ShapeDtypeStruct(
      shape, dtype, sharding=place
    )


def size(tree: PyTree) -> int:
  """Bytes on a device of arrays that are described with their places."""
  each = lambda x: (
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    else 0
  )
  return sum(map(each, jax.tree.leaves(tree)))


def _placed(shapes: PyTree, places: PyTree) -> PyTree:
  put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return jax.tree.map(put, shapes, places)


def _outputs(
  f: Callable, spec: ProgramSpec, args: tuple, done: jax.stages.Compiled
) -> Any:
  """What a program returns, with the places that the compiler chose."""
  shapes = jax.eval_shape(functools.partial(f, spec), *args)
  return _placed(shapes, done.output_shardings)


def every(run: Run, compile: Compile) -> Iterator[Program]:
  """All programs, in the order in which a step runs them."""
  yield from _sampling(run, compile)
  yield from _updating(run)
  yield from _evaluating(run, compile)


def _prompts(run: Run, count: int) -> PrefillBatch:
  own, S = run.at("data"), run.config.data.prompt_tokens
  return PrefillBatch(
    Prompts(
      own((count, S), jnp.int32),
      own((count, S), jnp.bool_),
      own((count,), jnp.int32),
    ),
    offset=own((count,), jnp.int32),
    real=own((count,), jnp.bool_),
  )


def _key(run: Run):
  key = jax.eval_shape(lambda: jax.random.key(0))
  return run.at()(key.shape, key.dtype)


def _spec(
  run: Run, fits: RolloutPlan, *, n: int, places: int, cut: SamplingParams
) -> ProgramSpec:
  """As `stream` and `sampler.rollouts` make it of the same plan."""
  each = max(places // run.data, 1)
  T = run.config.sampling.max_new_tokens
  return program_spec.with_cache(
    ProgramSpec(
      sampling.decoder(run.config.sampling, run.policy),
      cut,
      stop_ids=(0,),
      n=n,
      max_new_tokens=T,
      lanes=min(-(-fits.lanes // run.data), each),
      slots=fits.slots,
      columns=program_spec.page_columns(T),
      mesh=run.mesh,
    ),
    fits.blocks,
  )


def _cache(run: Run, spec: ProgramSpec, compile: Compile) -> tuple[Any, ...]:
  """The pages of the longest rollouts, or the pool."""
  if spec.blocks:
    made = compile(programs.pool.lower(spec))
    return (_outputs(programs.pool, spec, (), made),)
  rows = spec.lanes * spec.slots * run.data
  page = jax.eval_shape(lambda: spec.policy.page(rows, spec.columns))
  heads = run.at("data", "model")
  place = lambda x: heads(x.shape, x.dtype)
  return (jax.tree.map(place, page),) * spec.pages


class _Decoding(NamedTuple):
  """Between two programs of the sampler, as shapes."""

  inputs: DecodeInputs
  pages: tuple[Any, ...]
  state: DecodeState

  def of(self, layers: int) -> "_Decoding":
    """The same for a policy of the first layers."""
    weights, prefix, queue = self.inputs
    cut = lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], layers, *x.shape[2:]), x.dtype, sharding=x.sharding
    )
    prefix = dataclasses.replace(prefix, k=cut(prefix.k), v=cut(prefix.v))
    weights = weights | {"blocks": weights["blocks"][:layers]}
    pages = tuple(page[:layers] for page in self.pages)
    return _Decoding(DecodeInputs(weights, prefix, queue), pages, self.state)


def _started(
  run: Run, spec: ProgramSpec, places: int, name: str, compile: Compile
) -> tuple[Program, _Decoding]:
  """The prefill, and what it leaves."""
  args = (run.state().params, batch := _prompts(run, places), _key(run))
  lowered = programs.start.lower(spec, *args)
  inputs, state, _ = _outputs(programs.start, spec, args, compile(lowered))
  held = run.sampling_bytes + size(batch)
  return (
    Program(name, lowered, held, run.policy.layers),
    _Decoding(inputs, _cache(run, spec, compile), state),
  )


def _decode(
  run: Run, spec: ProgramSpec, decoding: _Decoding, name: str
) -> Iterator[Program]:
  """The decode loop, over as many pages as there can be."""
  whole, L = run.at(), run.policy.layers
  for layers in FEW if run.fast else (L,):
    policy = dataclasses.replace(spec.policy, layers=layers)
    inputs, pages, state = decoding.of(layers)
    lowered = programs.segment.lower(
      dataclasses.replace(spec, policy=policy),
      inputs,
      pages[:-1],
      pages[-1],
      state,
      whole((), jnp.bool_),
      whole((), jnp.int32),
    )
    held = run.sampling_bytes + size((inputs, pages, state))
    yield Program(name, lowered, held, layers)


def _sampling(run: Run, compile: Compile) -> Iterator[Program]:
  """As `stream` runs them."""
  c = run.config.sampling
  spec = run.spec()
  prefill, decoding = _started(run, spec, c.places, "prefill", compile)
  yield prefill
  yield from _decode(run, spec, decoding, "decode")
  inputs, pages, state = decoding
  held = run.sampling_bytes + size(decoding)
  program = lambda name, lowered, more=0: Program(
    name, lowered, held + more, run.policy.layers
  )
  at = run.at("data")((run.visited,), jnp.int32)
  batch = _prompts(run, run.visited)
  yield program(
    "admit",
    stream._admit.lower(
      spec,
      run.state().params,
      inputs.prefix,
      inputs.queue,
      state,
      batch,
      at,
      _key(run),
    ),
    size(batch),
  )
  least = max(-(-spec.slots // sampler.SHRINK), 1)
  fewer = dataclasses.replace(spec, slots=least)
  moved = [] if spec.blocks else list(pages)
  yield program("compact", programs.resize.lower(fewer, moved, state))
  share = run.at()((), jnp.float32)
  yield program("take", stream._taken.lower(spec, state, at, share))


def _evaluating(run: Run, compile: Compile) -> Iterator[Program]:
  """As `sampler.rollouts` runs them during training."""
  c = run.config.eval
  spec = _spec(
    run,
    run.evaluations,
    n=c.n,
    places=run.chunk,
    cut=SamplingParams(temperature=c.temperature, top_p=c.top_p),
  )
  prefill, decoding = _started(
    run, spec, run.chunk, "evaluation: prefill", compile
  )
  yield prefill
  yield from _decode(run, spec, decoding, "evaluation: decode")
  yield Program(
    "evaluation: finish",
    programs.finish.lower(spec, decoding.state),
    run.sampling_bytes + size(decoding),
    run.policy.layers,
  )


def batch(run: Run, *, scored: bool) -> Batch:
  """Shapes of the longest batch of an update, where it lies."""
  c = run.config
  layout = packing.Layout(
    c.optim.rows, c.optim.blocks, c.sampling.max_new_tokens
  )
  own = run.at(None, "data")
  C, P, M = packing.MICROBATCHES, c.optim.blocks, c.optim.rows
  S, T = c.data.prompt_tokens, layout.length
  of = lambda *shape, dtype=jnp.float32: own((C, P, *shape), dtype)
  logp = of(M, T)
  second = scored and c.optim.minibatches > 1
  return Batch(
    prompt=of(S, dtype=jnp.int32),
    prompt_mask=of(S, dtype=jnp.bool_),
    response=of(M, T, dtype=jnp.int32),
    mask=of(M, T, dtype=jnp.bool_),
    logp_sampled=logp,
    advantage=of(M),
    weight=of(M),
    used=run.at()((), jnp.int32),
    logp_old=logp if second else None,
    logp_ref=logp if scored and c.reference.kl_weight else None,
  )


def _updating(run: Run) -> Iterator[Program]:
  """As the update stage runs them, for the longest responses."""
  c, state = run.config, run.state()
  policy = dataclasses.replace(run.policy, remat=c.devices.remat, mesh=run.mesh)
  logp = policy.response_logp
  plain, scored = batch(run, scored=False), batch(run, scored=True)
  resident = run.applying_bytes if c.devices.offload == "nothing" else 0
  resident = resident or run.sampling_bytes
  program = functools.partial(Program, layers=run.policy.layers)
  if c.optim.minibatches > 1 or c.reference.kl_weight:
    yield program(
      "score",
      update.logp_of.lower(
        state.params, plain, c.sampling.temperature, response_logp=logp
      ),
      resident + size(plain),
    )
  shapes = jax.eval_shape(update.zero_gradient, state.params)
  whole = run.at()
  place = lambda x: whole(x.shape, x.dtype)
  like = lambda x, p: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=p.sharding
  )
  sums = (
    jax.tree.map(like, shapes[0], state.params),
    jax.tree.map(place, shapes[1]),
  )
  yield program(
    "gradient",
    update._add.lower(
      sums,
      state.params,
      scored,
      response_logp=logp,
      objective=learning.objective(
        c.loss, c.reference, temperature=c.sampling.temperature
      ),
    ),
    resident + size((sums, scored)),
  )
  yield program(
    "apply",
    update._apply.lower(state, sums, tx=run.tx, watch=_watch(run, policy)),
    run.applying_bytes + size(sums),
  )


def _watch(run: Run, policy: Policy) -> Any:
  """What an update watches of the theorem; None if nothing."""
  c = run.config
  if not c.theory.prompts:
    return None
  P, M, N = c.theory.prompts, c.theory.responses, c.sampling.n
  P = min(P, c.sampling.prompts)
  S = c.data.prompt_tokens
  T = min(c.theory.tokens, c.sampling.max_new_tokens)
  of = lambda dtype, *shape: np.zeros(shape, dtype)
  probe = theory.Probe(
    prompt=of(np.int32, P, S),
    prompt_mask=of(bool, P, S),
    response=of(np.int32, P, M, T),
    mask=of(bool, P, M, T),
    probability=of(np.float32, P, M),
    correct=of(bool, P, M),
    sampled=of(np.float32, P, N),
    sampled_correct=of(bool, P, N),
    unsampled=of(np.float32, P),
  )
  mass = learning.mean_mass(policy, c.sampling)
  return jax.tree_util.Partial(mass, probe)
