"""Where the prompts of a run come from, and what they look like."""

import collections
import functools
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from brorl_jax import ledger as ledgers
from brorl_jax import order, tokenizer, types
from brorl_jax.ledger import Ledger
from brorl_jax.main import settings
from brorl_jax.main.settings import Config
from brorl_jax.tasks import dataset, gym, heldout, mixture
from brorl_jax.tasks.base import Example
from brorl_jax.tasks.records import Place

_PROBES = 256  # prompts per family that are measured before anything starts
# gym.puzzle takes indexes below 2**44; 2 million steps need those below 2**41.
_SUBSTITUTES, _SUBSTITUTE_BITS = 8, 41
_SHOWN = 5  # lines that were left out


class TooLong(ValueError):
  """A prompt has more tokens than the budget."""


def families(c: Config) -> list[gym.Family]:
  """What puzzles are drawn from; raises ValueError if one of them is wrong."""
  out = [
    gym.Family(name, f.settings.to_dict(), f.weight)
    for name, f in c.families.items()
  ]
  gym.check(out)
  return out


def _by_domain(some: Iterable[Example]) -> dict[str, list[Example]]:
  out = collections.defaultdict[str, list[Example]](list)
  for example in some:
    out[example.domain].append(example)
  return dict(out)


class Examples:
  """Prompts of a run: generated puzzles, and examples from files.

  Attributes:
    stop_ids: Tokens that end a response.
    families: Of the puzzles, with a weight; none if none are generated.
    domains: Those that are drawn.
    files: Those to train on by absolute path, each with its digest.
    left_out: Bad lines of the files, each with its place and what is wrong.
    fingerprint: What a run that goes on must find unchanged.
    says: What was read, and what was left out, in lines.
  """

  def __init__(self, c: Config, text: tokenizer.Tokenizer):
    """Raises ValueError if a family or file is wrong, or prompts too long."""
    self._c, self._text = c, text
    self.stop_ids = text.stop_ids
    self.example = functools.lru_cache(maxsize=1 << 14)(self._draw)
    self.says: list[str] = []
    self.left_out: list[str] = []
    self._places: dict[str, Place | str] = {}
    self.files = dataset.file_digests(c.data.files) if c.data.files else {}
    given = self.files or c.data.heldout_files
    self._train, self._heldout = self._read() if given else ({}, [])
    # An evaluation may have held-out files alone; nothing is drawn from them.
    stored = self._train or _by_domain(self._heldout)
    made = c.domains.gym.weight > 0.0 and "gym" not in stored
    every = families(c) if made else []
    self.families = [family for family in every if family.weight > 0.0]
    drawn = [family.name for family in self.families]
    heldout.refuse_drawn(self.placed(self._heldout), drawn)
    for family in self.families:
      for i in range(_PROBES):
        self._render(gym.puzzle(family, "train", i, seed=c.seed))
    sizes: dict[str, int | None] = {
      name: len(some) for name, some in stored.items()
    }
    digests = {name: dataset.digest(s) for name, s in stored.items()}
    if made:
      version = importlib.metadata.version("reasoning-gym")
      sizes["gym"], digests["gym"] = None, f"reasoning-gym {version}"
    if not sizes:
      raise ValueError(
        "there is nothing to train on: config.domains.gym.weight is 0, and "
        "config.data.files names no file; raise the one, or give the other"
      )
    weights = {name: c.domains[name].weight for name in sizes}
    self._order = order.Order(sizes, weights, seed=c.seed)
    self.fingerprint = self._order.fingerprint(digests)
    self.fingerprint["held out"] = dataset.digest(self._heldout)
    self.domains = [name for name in sizes if weights[name] > 0.0]

  def _read(self) -> tuple[dict[str, list[Example]], list[Example]]:
    """Training examples of each domain, and held-out ones, from the files."""
    data = self._c.data
    read = functools.partial(dataset.read, skip_bad=data.skip_bad)
    train = read(data.files) if data.files else dataset.Data([], [])
    if data.heldout_files:
      held = read(data.heldout_files)
      heldout.refuse_overlap(train, held)
    else:
      train, held = heldout.split(train, one_in=data.heldout_one_in)
    self.left_out = [str(one) for one in (*train.skipped, *held.skipped)]
    by_domain = _by_domain(self._fitting(train))
    kept = self._fitting(held)
    for example, place in zip(held.examples, held.places, strict=True):
      self._places[example.id] = place
    counts = [f"{k} {len(v)}" for k, v in sorted(by_domain.items())]
    self.says += [
      f"files: {', '.join(counts) or 'none to train on'}; held out "
      f"{len(kept)}; left out {len(self.left_out)} bad lines; {train.repeats} "
      "prompts come more than once",
      *(f"  left out: {one}" for one in self.left_out[:_SHOWN]),
    ]
    return by_domain, list(kept)

  def _fitting(self, data: dataset.Data) -> Sequence[Example]:
    """Those whose prompts are not too long; raises TooLong if that is asked."""
    if not self._c.data.drop_long:
      for example in data.examples:
        self._render(example)
      return data.examples
    tokens = lambda example: len(self._ids(example))
    kept, dropped = dataset.fit(data.examples, tokens, self._c.prompt_tokens)
    limit = self._c.prompt_tokens
    for name in {example.domain for example in dropped}:
      if all(example.domain != name for example in kept):
        raise TooLong(
          f"no {name} prompt has at most config.prompt_tokens = {limit} "
          "tokens: raise it"
        )
    if dropped:
      self.says.append(
        f"left out {len(dropped)} prompts of more than {limit} tokens"
      )
    return kept

  def _ids(self, example: Example) -> list[int]:
    last = {"role": "user", "content": self.asked(example)}
    return self._text.render([*example.messages[:-1], last])

  def asked(self, example: Example) -> str:
    """The user's last message, with what its domain asks for."""
    added = self._c.domains[example.domain].instruction
    return "\n".join(part for part in (example.question, added) if part)

  def _render(self, example: Example) -> list[int]:
    ids = self._ids(example)
    if len(ids) > self._c.prompt_tokens:
      remedy = (
        "narrow the family's settings"
        if example.id.startswith(f"{example.task}/")
        else "set config.data.drop_long"
      )
      raise TooLong(
        f"{example.id} has {len(ids)} prompt tokens, config.prompt_tokens = "
        f"{self._c.prompt_tokens}: raise it, or {remedy}"
      )
    return ids

  def refuse_changes(self, before: Mapping[str, str] | None) -> None:
    """Raises ValueError if a run that goes on had other examples."""
    if before is not None:
      order.refuse_changes(before, self.fingerprint)

  def heldout(self) -> list[Example]:
    """So many of each task, which training never draws."""
    c, by_task = self._c, collections.defaultdict[str, list[Example]](list)
    for example in self._heldout:
      if example.domain in self.domains:
        by_task[example.task].append(example)
    out = [e for task in by_task.values() for e in task[: c.eval_prompts]]
    count = c.eval_prompts
    try:
      made = gym.heldout(self.families, per_family=count, seed=c.seed)
    except ValueError as e:
      raise ValueError(f"config.eval_prompts = {count}: {e}") from None
    for example in made:
      self._render(example)
    if not (out := out + made):
      raise ValueError(
        "there is no held-out prompt of a domain whose config.domains weight "
        "is positive; raise one, or give examples"
      )
    return out

  def placed(self, examples: Sequence[Example]) -> dataset.Data:
    """Held-out examples, with where each comes from."""
    of = lambda example: self._places.get(example.id, f"puzzle {example.id}")
    return dataset.Data(examples, [of(example) for example in examples])

  def candidates(
    self, step: int, ledger: Ledger, *, most: int
  ) -> Sequence[int]:
    """Numbers p of the prompts that a step may draw, in their order.

    Files are gone through from where the step before ended; puzzles without
    end begin anew in each step, so that step and p name one.
    """
    count = self._c.distinct_prompts
    if count:
      resting = ledgers.resting(ledger, step)
      shuffled = np.random.default_rng([self._c.seed, step]).permutation(count)
      return [int(p) for p in shuffled if p not in resting][:most]
    start = ledger.drawn if self._train else 0
    return range(start, start + most)

  def _draw(self, step: int, position: int) -> Example:
    """Candidate `position` of a step."""
    anew = not self._train and not self._c.distinct_prompts
    number = mixture.index(step, position) if anew else position
    domain, element = self._order[number]
    if domain in self._train:
      return self._train[domain][element]
    return self._made(element)

  def _made(self, element: int) -> Example:
    """Puzzle `element`: a function of (seed, element)."""
    step, position = divmod(element, mixture.POSITIONS)
    weights = [family.weight for family in self.families]
    which = mixture.pick(self._c.seed, step, position, weights)
    # A prompt that is rarer than the probes and too long must not end a run of
    # a week: the next of its own substitutes takes its place.
    for substitute in range(_SUBSTITUTES):
      puzzle = gym.puzzle(
        self.families[which],
        "train",
        element + (substitute << _SUBSTITUTE_BITS),
        seed=self._c.seed,
      )
      try:
        self._render(puzzle)
      except TooLong as e:
        error = e
        continue
      return puzzle
    raise settings.UserError(str(error))

  def prompts(self, step: int, candidates: Sequence[int]) -> types.Prompts:
    """Stage 1: some candidates of a step."""
    index = np.array(candidates, np.int32)
    return self.pad([self.example(step, p) for p in candidates], index)

  def pad(
    self, examples: Sequence[Example], index: np.ndarray
  ) -> types.Prompts:
    """Examples as the sampler takes them, with their numbers p."""
    ids = [self._render(example) for example in examples]
    return types.Prompts(*tokenizer.left_pad(ids, self._c.prompt_tokens), index)

  def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
    """Texts of responses."""
    return self._text.decode(responses)
