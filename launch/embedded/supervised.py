r"""Supervised training on prompts with responses, packed side by side in rows.

  python -m launch.embedded.supervised pairs.jsonl --checkpoint=DIR \
      --workdir=warm --epochs=2
  brorl --config=n512 --workdir=run --config.policy.checkpoint=warm

A line of pairs.jsonl has a "response", and a "prompt" or "messages". The result
is a Hugging Face directory, written at the end.

loss = - sum over response tokens of log pi(token | what precedes it) / count
"""

import argparse
import collections
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from brorl_jax.data import dataset
from brorl_jax.data.schema import Form
from brorl_jax.errors import UserError
from brorl_jax.learner import state as states
from brorl_jax.main import export
from brorl_jax.model import huggingface
from brorl_jax.model.tokenizer import Tokenizer, model_file
from brorl_jax.plan import checkpoint_source
from brorl_jax.runs import folder
from brorl_jax.types import Trees
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import posed
from brorl_jax.verdicts.domains import OWN

ResponseLogp = Callable[..., tuple[Array, Array]]  # `Policy.response_logp`
_LOOKS = 10  # times that the loss is shown, evenly over the updates


class Pair(NamedTuple):
  """Token ids of a prompt and of its response, the end token included."""

  prompt: Sequence[int]
  response: Sequence[int]


class PairLayout(NamedTuple):
  """The static shape of all updates."""

  tokens: int  # T, of a row
  rows: int  # B, of a microbatch
  microbatches: int  # C, of an update


class Rows(NamedTuple):
  """The pairs of one update: no pair attends to another, see `types.Trees`."""

  tokens: Int[Array, "C B T"] | Int[np.ndarray, "C B T"]
  # One behind the last token of a token's pair; 0 marks padding.
  end: Int[Array, "C B T"] | Int[np.ndarray, "C B T"]
  counts: Bool[Array, "C B T"] | Bool[np.ndarray, "C B T"]  # response tokens
  used: Int[Array, ""] | Int[np.ndarray, ""]  # microbatches with any pair


def epoch(
  lengths: Sequence[int], layout: PairLayout, order: Sequence[int]
) -> Iterator[list[list[int]]]:
  """The rows of each update of one epoch, as indices of pairs.

  A pair goes into the first row with room. One that fits into no row waits for
  the next update, which begins with it. An update ends when as many pairs wait
  as it has rows. None of the `lengths` is more than a row has tokens.
  """
  rows, waiting = layout.rows * layout.microbatches, collections.deque(order)
  while waiting:
    placed: list[list[int]] = [[] for _ in range(rows)]
    room = np.full(rows, layout.tokens)
    left = []
    while waiting and len(left) < rows:
      pair = waiting.popleft()
      fits = np.flatnonzero(room >= lengths[pair])
      if fits.size:
        placed[fits[0]].append(pair)
        room[fits[0]] -= lengths[pair]
      else:
        left.append(pair)
    yield [row for row in placed if row]
    waiting.extendleft(reversed(left))


def updates(
  pairs: Sequence[Pair], layout: PairLayout, *, seed: int
) -> Iterator[tuple[int, list[list[int]]]]:
  """The epoch, from 0, and the rows of each update, shuffled in each epoch."""
  for number in itertools.count():
    order = np.random.default_rng([seed, number]).permutation(len(pairs))
    for rows in epoch(_lengths(pairs), layout, order.tolist()):
      yield number, rows


def _lengths(pairs: Sequence[Pair]) -> list[int]:
  return [len(x.prompt) + len(x.response) for x in pairs]


def updates_in(
  pairs: Sequence[Pair], layout: PairLayout, *, epochs: int, seed: int
) -> int:
  """The number of updates in `epochs` epochs."""
  each = updates(pairs, layout, seed=seed)
  return sum(1 for _ in itertools.takewhile(lambda x: x[0] < epochs, each))


def pack(
  pairs: Sequence[Pair], rows: Sequence[Sequence[int]], layout: PairLayout
) -> Rows:
  """The pairs of each row, as arrays."""
  C, B, T = layout.microbatches, layout.rows, layout.tokens
  tokens = np.zeros((C * B, T), np.int32)
  ends, counts = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
  for i, row in enumerate(rows):
    at = 0
    for pair in row:
      prompt, response = pairs[pair]
      middle, end = at + len(prompt), at + len(prompt) + len(response)
      tokens[i, at:end] = [*prompt, *response]
      ends[i, at:end] = end
      counts[i, middle:end] = True
      at = end
  fold = lambda x: x.reshape(C, B, T)
  used = np.array(-(-len(rows) // B), np.int32)
  return Rows(fold(tokens), fold(ends), fold(counts), used)


def train(
  params: PyTree,
  pairs: Sequence[Pair],
  *,
  response_logp: ResponseLogp,
  tx: optax.GradientTransformation,
  layout: PairLayout,
  count: int,
  seed: int,
  look: Callable[[int, float], None],
) -> PyTree:
  """Minimises the negative log-likelihood of the responses, in `count` updates.

  The loss is divided by the tokens of the whole update: neither microbatches
  nor packing change it. `params` are donated. There is at least one pair, none
  longer than a row. `look` receives the number of an update and its loss, in
  nats per token, some ten times and at the end. Raises FloatingPointError if
  that loss is not finite.
  """
  state = params, jax.jit(tx.init)(params)
  del params
  plan = itertools.islice(updates(pairs, layout, seed=seed), count)
  for number, (_, rows) in enumerate(plan, 1):
    batch = pack(pairs, rows, layout)
    *state, loss = _update(*state, batch, response_logp=response_logp, tx=tx)
    if number % max(count // _LOOKS, 1) == 0 or number == count:
      if not np.isfinite(loss):
        raise FloatingPointError(
          f"update {number}: the loss is {loss}; lower the learning rate"
        )
      look(number, float(loss))
  return state[0]


def logp_of(
  params: PyTree,
  tokens: Int[Array, "B T"],
  end: Int[Array, "B T"],
  response_logp: ResponseLogp,
) -> Float[Array, "B T-1"]:
  """Log-probability of each token but the first of a row, in nats; of the first
  token of a pair it means nothing.
  """
  B, T = tokens.shape
  parent = jnp.broadcast_to(jnp.arange(T - 1), (B, T - 1))
  trees = Trees(tokens, end, parent, tokens[:, 1:], parent[:, None])
  none = jnp.zeros((B, 0), jnp.int32)
  rest = tokens[:, None, 1:]
  logp, _ = response_logp(params, none, none > 0, rest, trees=trees)
  return logp[:, 0]


def _loss(
  params: PyTree, rows: Rows, i: Array, response_logp: ResponseLogp
) -> Float[Array, ""]:
  """Of one microbatch, not divided."""
  logp = logp_of(params, rows.tokens[i], rows.end[i], response_logp)
  return -jnp.sum(logp, where=rows.counts[i, :, 1:])


@functools.partial(
  jax.jit,
  static_argnames=("response_logp", "tx"),
  donate_argnames=("params", "opt"),
)
def _update(
  params: PyTree,
  opt: PyTree,
  rows: Rows,
  *,
  response_logp: ResponseLogp,
  tx: optax.GradientTransformation,
) -> tuple[PyTree, PyTree, Float[Array, ""]]:
  def add(i, sums):
    loss, grads = jax.value_and_grad(_loss)(params, rows, i, response_logp)
    return jax.tree.map(jnp.add, sums, (loss, grads))

  zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
  sums = jax.lax.fori_loop(0, rows.used, add, (jnp.zeros(()), zeros))
  count = jnp.sum(rows.counts, dtype=jnp.float32)
  loss, grads = jax.tree.map(lambda x: x / count, sums)
  changes, opt = tx.update(grads, opt, params)
  return optax.apply_updates(params, changes), opt, loss


def read_pairs(
  paths: Sequence[str], text: Tokenizer, *, row_tokens: int
) -> list[Pair]:
  """The pairs of files, posed as a run poses prompts.

  Raises ValueError for a line without prompt or response, or longer than a row.
  """
  data = dataset.read(paths, form=Form(sole=OWN), domains={})
  out = []
  for example, place in zip(data.examples, data.places, strict=True):
    try:
      response = strict_json.text(example.columns.get("response"), "response")
    except strict_json.Refused as e:
      raise ValueError(f"{place}, {e}; every line needs one") from None
    ids = [*text.encode(response), text.stop_ids[0]]
    out.append(pair := Pair(text.render(posed(example)), ids))
    if (length := sum(map(len, pair))) > row_tokens:
      raise ValueError(
        f"{place}: prompt and response have {length:,} tokens, more than the "
        f"{row_tokens:,} of a row; shorten them or raise --row_tokens"
      )
  return out


def run(flags: argparse.Namespace) -> None:
  """Trains a checkpoint and writes it to `flags.workdir`."""
  folder.check_empty(flags.workdir)
  source = huggingface.locate(flags.checkpoint)
  text = Tokenizer(source)
  policy, params = huggingface.load(source)
  if flags.row_tokens > policy.max_positions:
    raise ValueError(
      f"--row_tokens={flags.row_tokens} must be at most "
      f"{policy.max_positions}, the longest input of this checkpoint"
    )
  checkpoint_source.check_vocabulary(source, text, policy)
  pairs = read_pairs(flags.files, text, row_tokens=flags.row_tokens)
  layout = PairLayout(flags.row_tokens, flags.rows, flags.microbatches)
  count = updates_in(pairs, layout, epochs=flags.epochs, seed=flags.seed)
  adam = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
  tx, _ = states.adamw(lr=flags.lr, warmup=10, total=count, **adam)
  params = train(
    params,
    pairs,
    response_logp=policy.response_logp,
    tx=tx,
    layout=layout,
    count=count,
    seed=flags.seed,
    look=lambda number, loss: print(
      f"update {number}/{count}: {loss:.3f} nats per token", file=sys.stderr
    ),
  )
  # An evaluation compares its prompts with what runs trained the model on.
  record = model_file(source / checkpoint_source.TRAINED_ON)
  also = {record.name: record.read_text()} if record.is_file() else {}
  export.write(
    flags.workdir, policy, params, source=source, text=text, also=also
  )
  print(f"wrote {flags.workdir}", file=sys.stderr)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  add = parser.add_argument
  add("files", nargs="+", help="files, folders or data sets of pairs")
  add("--checkpoint", default="", help="a Hugging Face directory")
  add("--workdir", type=pathlib.Path, required=True, help="an empty folder")
  add("--lr", type=float, default=1e-5, help="peak; falls to 0 as a cosine")
  add("--epochs", type=int, default=2, help="passes over all pairs")
  add("--row_tokens", type=int, default=2048, help="pairs share rows")
  add("--rows", type=int, default=8, help="of a microbatch; they fit in memory")
  add("--microbatches", type=int, default=4, help="of an update")
  add("--seed", type=int, default=0, help="of the order of the pairs")
  flags = parser.parse_args()
  for name in ("lr", "epochs", "row_tokens", "rows", "microbatches"):
    if getattr(flags, name) <= 0:
      parser.error(f"--{name}={getattr(flags, name)} must be positive")
  try:
    run(flags)
  except (UserError, ValueError, FloatingPointError) as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  main()
