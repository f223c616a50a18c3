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

from brorl_jax.many import meshes
from brorl_jax.model import local
from brorl_jax.plan import sizes
from brorl_jax.plan.run import (
  FEW,
  Compile,
  Job,
  Program,
  placed,
  size,
  spec_of,
  training_spec,
)
from brorl_jax.rollout import programs, sampler, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.programs import Chunks, DecodeInputs, PrefillBatch
from brorl_jax.rollout.slots import DecodeState
from brorl_jax.types import Prompts


def copying(run: Job) -> Program:
  """The parameters of all devices, to each process' own."""
  params = run.state().params
  lowered = local.spread(params, run.own).lower(params)
  return Program("copy", lowered, run.sampling_bytes, run.policy.layers)


def _outputs(
  f: Callable, spec: ProgramSpec, args: tuple, done: jax.stages.Compiled
) -> Any:
  """What a program returns, with the places that the compiler chose."""
  shapes = jax.eval_shape(functools.partial(f, spec), *args)
  return placed(shapes, done.output_shardings)


def _prompts(run: Job, count: int) -> Prompts:
  own, S = run.at(meshes.rows(run.mesh)), run.config.data.prompt_tokens
  return Prompts(
    own((count, S), jnp.int32),
    own((count, S), jnp.bool_),
    own((count,), jnp.int32),
  )


def _key(run: Job):
  key = jax.eval_shape(lambda: jax.random.key(0))
  return run.at()(key.shape, key.dtype)


def _cache(run: Job, spec: ProgramSpec, compile: Compile) -> tuple[Any, ...]:
  """The pages of the longest rollouts, or the pool."""
  if spec.blocks:
    made = compile(programs.pool.lower(spec))
    return (_outputs(programs.pool, spec, (), made),)
  rows = spec.lanes * spec.slots * run.rows
  page = jax.eval_shape(lambda: spec.policy.page(rows, spec.columns))
  heads = run.at(meshes.rows(run.mesh), "tensor")
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


def _decode(
  run: Job, spec: ProgramSpec, decoding: _Decoding, name: str
) -> Iterator[Program]:
  """The decode loop, over as many pages as there can be."""
  whole, L = run.at(), run.policy.layers
  for layers in FEW if run.fast else (L,):
    policy = dataclasses.replace(run.policy, layers=layers)
    policy = sizes.decoder(run.config, policy)
    inputs, pages, state = decoding.of(layers)
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
    held = run.sampling_bytes + size((inputs, pages, state))
    yield Program(name, lowered, held, layers)


def sampling(run: Job, compile: Compile) -> Iterator[Program]:
  """As `stream` runs them."""
  c = run.config.sampling
  spec = training_spec(run)
  each, own = c.places // run.rows, run.at(meshes.rows(run.mesh))
  prompts = _prompts(run, run.read_together)
  part = stream.PromptPart(prompts.tokens, prompts.mask, prompts.index)
  args = (run.state().params, part, _key(run))
  opened = functools.partial(stream.open_shelf, each=each)
  lowered = stream.open_shelf.lower(spec, *args, each=each)
  inputs, logits, state, _ = _outputs(opened, spec, args, compile(lowered))
  decoding = _Decoding(inputs, _cache(run, spec, compile), state)
  before = run.sampling_bytes + size(part)
  yield Program("prefill", lowered, before, run.policy.layers)
  yield from _decode(run, spec, decoding, "decode")
  held = run.sampling_bytes + size((decoding, logits))
  program = lambda name, lowered, more=0: Program(
    name, lowered, held + more, run.policy.layers
  )
  weights, prefix, queue = inputs
  read = stream.read_more.lower(spec, weights, logits, prefix, part)
  yield program("read", read, size(part))
  at = own((run.visited,), jnp.int32)
  chunks = Chunks(at, at, own((run.visited,), jnp.bool_), at)
  admit = stream._admit.lower(spec, logits, queue, state, chunks, at, _key(run))
  yield program("admit", admit, size(chunks))
  lanes, slots = sampler.compact_sizes(
    spec.lanes, spec.slots, pool=bool(spec.blocks)
  )[:2][-1]
  fewer = dataclasses.replace(spec, lanes=lanes, slots=slots)
  yield program("compact", programs.resize.lower(fewer, state))
  share = run.at()((), jnp.float32)
  yield program("take", stream._taken.lower(spec, state, at, share))


def evaluating(run: Job, compile: Compile) -> Iterator[Program]:
  """As `sampler.rollouts` runs them during training."""
  c, heldout = run.config.eval, run.phase.memory.heldout
  cut = SamplingParams(temperature=c.temperature, top_p=c.top_p)
  places = heldout.prompts
  spec = spec_of(run, heldout.plan, n=c.n, places=places, cut=cut)
  each = run.at(meshes.rows(run.mesh))
  batch = PrefillBatch(
    _prompts(run, places),
    offset=each((places,), jnp.int32),
    real=each((places,), jnp.bool_),
  )
  args = run.state().params, batch, _key(run)
  lowered = programs.start.lower(spec, *args)
  inputs, state, _ = _outputs(programs.start, spec, args, compile(lowered))
  decoding = _Decoding(inputs, _cache(run, spec, compile), state)
  held = run.sampling_bytes + size(batch)
  yield Program("evaluation: prefill", lowered, held, run.policy.layers)
  yield from _decode(run, spec, decoding, "evaluation: decode")
  yield Program(
    "evaluation: finish",
    programs.finish.lower(spec, decoding.state),
    run.sampling_bytes + size(decoding),
    run.policy.layers,
  )
