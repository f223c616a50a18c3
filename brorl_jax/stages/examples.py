"""Stage 1: the prompts of a run, from files and generated puzzles."""

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from brorl_jax import types
from brorl_jax.config import Config
from brorl_jax.config.sampling import DataConfig, DomainConfig, FamilyConfig
from brorl_jax.data import data_order, dataset, schema
from brorl_jax.data.files import Place
from brorl_jax.data.schema import Form
from brorl_jax.errors import UserError
from brorl_jax.model import tokenizer
from brorl_jax.types import RunState
from brorl_jax.verdicts import base, strict_json
from brorl_jax.verdicts.base import MADE, Example, Family, posed
from brorl_jax.verdicts.domains import DOMAINS, DRAW, OWN
from brorl_jax.verdicts.strict_json import did_you_mean, show

_SHOWN_REASONS = 5  # why lines are left out, most first
_NAMED = 12  # unused columns that are named
_PUZZLES = 100  # of a family, if all prompts are evaluated
_PROBES = 256  # prompts per family whose length is checked at the start
# DRAW.puzzle takes indexes below 2**44; 2 million steps need 2**41.
_SUBSTITUTES, _SUBSTITUTE_BITS = 8, 41


def file_form(
  fields: str, domain: str, *, own: bool, entries: Sequence[str] = ()
) -> Form:
  """How the files of a config are read, from `data.fields` and `data.domain`.

  `own`: the user's own functions give the rewards, and all lines are of one
  domain. `entries`: of data.files and data.heldout_files. Raises ValueError for
  wrong fields or an unknown domain.
  """
  if domain and domain not in DOMAINS:
    near = did_you_mean(domain, DOMAINS, f"use one of {', '.join(DOMAINS)}")
    raise ValueError(f"config.data.domain = {domain!r} is unknown; {near}")
  known, sole = schema.known(DOMAINS), OWN if own else None
  try:
    return schema.form(fields, entries, known, Form(domain=domain, sole=sole))
  except ValueError as e:
    raise ValueError(f"config.data.fields: {e}") from None


def check_data(c: DataConfig, *, own: bool) -> None:
  """Raises ValueError if a config is wrong whatever its files hold."""
  if c.system:
    strict_json.text(c.system, "config.data.system")
  if own and (c.puzzles or not (c.files or c.heldout_files)):
    why = "config.reward.verifier scores lines of files alone"
    must = "name some in config.data.files, without config.data.puzzles"
    raise ValueError(f"{why}; {must}")


def read_files(c: DataConfig, own: bool) -> tuple[dataset.Data, dataset.Data]:
  """Training and held-out examples of files, of which there must be one. Raises
  ValueError if a file is invalid, or a prompt is on both sides.
  """
  sides = c.files, c.heldout_files
  form = file_form(c.fields, c.domain, own=own, entries=[*sides[0], *sides[1]])
  how = {"form": form, "domains": DOMAINS, "skip_bad": c.skip_bad}
  of = functools.partial(dataset.read, **how)
  return dataset.sides(of, *sides, c.heldout_one_in, c.skip_bad)


def _shares(weights: Mapping[str, float], *, made: bool) -> str:
  total, each = sum(weights.values()), sorted(weights.items())
  parts = ", ".join(f"{name} {w / total:.0%}" for name, w in each if w)
  how_many = "some are" if made else "none are"
  return f"prompts: {parts}; {how_many} generated (config.data.puzzles)"


class TooLong(ValueError):
  """A prompt has more tokens than the budget."""


def families(puzzles: Mapping[str, FamilyConfig]) -> list[Family]:
  """The puzzle families of a config; raises ValueError if one is invalid."""
  out = [Family(k, dict(f.settings), f.weight) for k, f in puzzles.items()]
  try:
    DRAW.check(out)
  except ImportError as e:  # reasoning-gym is optional
    raise ValueError(str(e)) from None
  return out


class Examples:
  """The prompts of a run: generated puzzles and examples from files.

  Attributes:
    stop_ids: Tokens that end a response.
    opened: The tag before each decoded response, which its prompt has, or "".
    families: Puzzle families that are generated.
    domains: Domains with a positive weight.
    files: Digests of the training files, by absolute path.
    forms: What data.fields says of each, and the digest of its function.
    dropped: Held-out prompts, `dataset.worded`, that training left out; hex.
    longest: Tokens of the longest prompt so far.
    left_out: Skipped lines of the files: the place, and what is wrong.
    fingerprint: Must be unchanged when a run resumes.
  """

  def __init__(self, config: Config, text: tokenizer.Tokenizer):
    """Raises ValueError if a family or file is invalid, or prompts too long."""
    c, seed = config.data, config.run.seed
    self._c, self._text, self._seed = c, text, seed
    self._evaluated = config.eval.prompts
    # Then all lines are of one domain and no puzzles are generated.
    own = bool(config.reward.verifier)
    self.stop_ids, self.opened = text.stop_ids, text.opened
    self.decode = text.decode  # token ids of responses -> texts
    self.reply = functools.lru_cache(maxsize=1 << 8)(text.reply)
    self.example = functools.lru_cache(maxsize=1 << 14)(self._draw)
    self.log_lines: list[str] = []
    self.left_out: list[str] = []
    self.longest = 0
    self.families: list[Family] = []
    check_data(c, own=own)
    self._places: dict[str, Place | str] = {}
    self.files = dataset.file_digests(c.files) if c.files else {}
    self.forms, self.dropped = dict[str, list[str]](), list[str]()
    given = self.files or c.heldout_files
    self._train, self._heldout = self._read(own) if given else ({}, [])
    # Whether each step has prompts of its own.
    self._anew = not self._train and not config.run.max_age
    # An evaluation may have only held-out files; nothing is drawn from them.
    stored = self._train or _by_domain(self._heldout)
    mixed = (c.puzzles or not given) and not own
    made = mixed and c.domains[MADE].weight > 0.0 and MADE not in stored
    if made:
      self.families = [f for f in families(c.families) if f.weight > 0.0]
    drawn = [family.name for family in self.families]
    dataset.refuse_drawn(self.placed(self._heldout), drawn)
    for family in self.families:
      for i in range(_PROBES):
        self._render(DRAW.puzzle(family, "train", i, seed=seed))
    sizes: dict[str, int | None] = {k: len(v) for k, v in stored.items()}
    digests = {name: dataset.digest(s) for name, s in stored.items()}
    if made:
      sizes[MADE], digests[MADE] = None, DRAW.version()
    if not sizes:
      raise ValueError(
        f"there is no training data: config.data.domains.{MADE}.weight is "
        "0 and config.data.files is empty; raise the weight, or name files"
      )
    weights = {name: c.domains[name].weight for name in sizes}
    self._order = data_order.Order(sizes, weights, seed=seed)
    self.fingerprint = self._order.fingerprint(digests)
    self.fingerprint["held out"] = dataset.digest(self._heldout)
    if text.template is not None:
      self.fingerprint["chat template"] = text.template.digest
    if text.date:
      self.fingerprint[tokenizer.DATE] = text.date
      self.log_lines.append(f"prompts show the date {text.date}, now and later")
    if tag := text.opened.strip():
      means = "only what follows the closing tag of a response is judged"
      self.log_lines.append(f"thinking: prompts end in {tag}; {means}")
    self.domains = [name for name in sizes if weights[name] > 0.0]
    if given:
      self.log_lines.append(_shares(weights, made=made))

  def _read(self, own: bool) -> tuple[dict[str, list[Example]], list[Example]]:
    train, held = read_files(self._c, own=own)
    skipped = [*train.skipped, *held.skipped]
    self.left_out, self.forms = [*map(str, skipped)], {**train.forms}
    if self._c.skip_bad and self._c.heldout_files:
      self.dropped = sorted({dataset.worded(e).hex() for e in held.examples})
    grouped, kept = _by_domain(self._fitting(train)), self._fitting(held)
    for example, place in zip(held.examples, held.places, strict=True):
      self._places[example.id] = place
    read = ", ".join(f"{k} {len(v)}" for k, v in sorted(grouped.items()))
    self.log_lines.append(
      f"files: {read or 'none to train on'}; held out {len(kept)}; left out "
      f"{len(skipped)} lines; {train.repeats} prompts occur more than once"
    )
    shown = dataset.by_reason(skipped)[:_SHOWN_REASONS]
    self.log_lines += [f"  left out {line}" for line in shown]
    passed = sorted({*train.columns, *held.columns})
    if passed and not own:  # own functions receive every column
      names = ", ".join(map(show, passed[:_NAMED]))
      more = ", ..." if len(passed) > _NAMED else ""
      self.log_lines.append(f"unused columns: {names}{more}")
    return grouped, list(kept)

  def _fitting(self, data: dataset.Data) -> Sequence[Example]:
    """The examples that fit; raises TooLong unless data.skip_bad is set."""
    if not self._c.skip_bad:
      for example in data.examples:
        self._render(example)
      return data.examples
    limit = self._c.prompt_tokens
    kept = [e for e in data.examples if len(self._ids(e)) <= limit]
    for name in {e.domain for e in data.examples} - {e.domain for e in kept}:
      why = f"every {name} prompt has more tokens; raise it"
      raise TooLong(f"config.data.prompt_tokens = {limit}: {why}")
    if dropped := len(data.examples) - len(kept):
      long = f"left out {dropped} prompts of more than {limit} tokens"
      self.log_lines.append(long)
    return kept

  def _ids(self, example: Example) -> list[int]:
    try:
      ids = self._text.render(self._posed(example))
    except ValueError as e:
      added = len(self._posed(example)) > len(example.messages)
      at = f"config.data.system = {self._c.system!r}" if added else example.id
      raise ValueError(f"{at}: {e}; leave it out") from e
    self.longest = max(self.longest, len(ids))
    return ids

  def domain(self, example: Example) -> DomainConfig:
    """The config of an example's domain."""
    return self._c.domains[example.domain]

  def asked(self, example: Example) -> str:
    """The last user message, with the text that the config adds."""
    return self._posed(example)[-1]["content"]

  def _posed(self, example: Example) -> list[dict[str, str]]:
    after = self.domain(example).instruction
    return posed(example, system=self._c.system, instruction=after)

  def _render(self, example: Example) -> list[int]:
    ids = self._ids(example)
    if len(ids) > self._c.prompt_tokens:
      remedy = "set config.data.skip_bad"
      if self.families:  # which are empty while files are read
        remedy = "narrow the family's settings"
      has = f"{example.id} has {len(ids)} prompt tokens"
      most = f"config.data.prompt_tokens = {self._c.prompt_tokens}"
      raise TooLong(f"{has}, but {most}; raise it, or {remedy}")
    return ids

  def refuse_changes(self, before: Mapping[str, str] | None) -> None:
    """Raises ValueError if a resumed run had other examples."""
    if before is not None:
      data_order.refuse_changes(before, self.fingerprint)

  def heldout(self) -> list[Example]:
    """The held-out prompts, eval.prompts per task or all; training never uses
    them.
    """
    by_task = collections.defaultdict[str, list[Example]](list)
    for example in self._heldout:
      if example.domain in self.domains:
        by_task[example.task].append(example)
    count = self._evaluated
    out = [e for task in by_task.values() for e in task[: count or None]]
    try:
      how = {"per_family": count or _PUZZLES, "fewer": not count}
      made = DRAW.heldout(self.families, seed=self._seed, **how)
    except ValueError as e:
      raise ValueError(f"config.eval.prompts = {count}: {e}") from None
    for example in made:
      self._render(example)
    if not (out := out + made):
      raise ValueError(
        "no domain with a positive config.data.domains weight has a held-out "
        "prompt; raise a weight, or add examples"
      )
    return out

  def placed(self, examples: Sequence[Example]) -> dataset.Data:
    """Held-out examples with their places in the files."""
    of = lambda example: self._places.get(example.id, f"puzzle {example.id}")
    return dataset.Data(examples, [of(example) for example in examples])

  def candidates(
    self, step: int, progress: RunState, *, most: int
  ) -> Sequence[int]:
    """Indices p of the prompts that a step may draw, in that order.

    Files continue where the previous step ended, and so does all with a
    max_age. Otherwise puzzles are unlimited: (step, p) identifies one, and p
    starts from 0 in each step.
    """
    start = 0 if self._anew else progress.drawn
    return range(start, start + most)

  def _draw(self, step: int, position: int) -> Example:
    anew = base.candidate_index(step, position)
    domain, element = self._order[anew if self._anew else position]
    if domain in self._train:
      return self._train[domain][element]
    return self._made(element)

  def _made(self, element: int) -> Example:
    """Puzzle `element`: a function of (seed, element)."""
    step, position = divmod(element, base.POSITIONS)
    weights = [family.weight for family in self.families]
    which = base.pick_family(self._seed, step, position, weights)
    family = self.families[which]
    # A rare prompt that is too long must not end a run after a week: it is
    # replaced by the first of its substitutes that fits.
    for substitute in range(_SUBSTITUTES):
      index = element + (substitute << _SUBSTITUTE_BITS)
      puzzle = DRAW.puzzle(family, "train", index, seed=self._seed)
      try:
        self._render(puzzle)
        return puzzle
      except TooLong as e:
        error = e
    raise UserError(str(error))

  def prompts(self, step: int, candidates: Sequence[int]) -> types.Prompts:
    """Stage 1: candidates of a step as token ids."""
    index = np.array(candidates, np.int32)
    return self.pad([self.example(step, p) for p in candidates], index)

  def pad(self, some: Sequence[Example], index: np.ndarray) -> types.Prompts:
    """Examples as padded token ids, with their indices p."""
    ids = [self._render(example) for example in some]
    return types.Prompts(*tokenizer.left_pad(ids, self._c.prompt_tokens), index)

  def turns(self, ids: np.ndarray, own: np.ndarray) -> list[str]:
    """The turns of an episode, of the policy and of its environment: of these
    tokens those that are the policy's `own`, and the others.
    """
    parts = np.split(ids, np.flatnonzero(np.diff(own)) + 1)
    said = self.decode([part.tolist() for part in parts[::2]])
    out = [""] * len(parts)
    out[::2] = [text.removeprefix(self.opened) for text in said]
    out[1::2] = [self._text.replied(part.tolist()) for part in parts[1::2]]
    return out

  def shown(self, ids: np.ndarray, own: np.ndarray) -> str:
    """A response as text; in an episode each reply is a line of its own."""
    if own.all():
      return self.decode([ids.tolist()])[0]
    each = enumerate(self.turns(ids, own))
    return "\n".join(f"[reply] {x}" if i % 2 else x for i, x in each)


def _by_domain(examples: Iterable[Example]) -> dict[str, list[Example]]:
  out = collections.defaultdict[str, list[Example]](list)
  for example in examples:
    out[example.domain].append(example)
  return dict(out)
