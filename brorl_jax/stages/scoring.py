"""Stage 3: responses -> verdicts -> rewards."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from brorl_jax import types
from brorl_jax.config.learning import Reward
from brorl_jax.stages.examples import Examples
from brorl_jax.types import Prompts, Rollouts, ScoredResponse, Scores
from brorl_jax.verdicts import own
from brorl_jax.verdicts.base import Example, Verdict
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.pool import Job, Pool, TimedVerdict
from brorl_jax.verdicts.sandbox import jail
from brorl_jax.verdicts.sandbox.process import MAX_TEST_S, PATIENCE
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

Step = int | None  # None in an evaluation
_Said = dict[str, TimedVerdict]  # by a hash of what was asked
_CHANGED = "tokens", "logp", "mask", "truncated"  # of rollouts, by a reply
# Of a reply's token, on average: a longer one is not encoded (5 MB take 7 s).
_MOST_CHARACTERS = 32


class Scorer:
  """The verifiers of a run and their worker processes.

  Attributes:
    sandbox: How responses are isolated from this machine, by kind of verifier.
    log_lines: The same as text, for the log.
    functions: The user's own functions by config field, with name and digest.
    whole: One of them that takes all responses to a prompt, or "".
    episodes: Whether the function is an environment: `reply` says what it adds.
    folder: Where what it says in a step is kept, for a start that goes on.
  """

  def __init__(self, c: Reward, examples: Examples, given: own.Given = None):
    """Starts the workers, and imports own functions that are not `given`;
    raises ValueError if this machine cannot run untrusted programs safely.
    """
    self._examples = examples
    self.sandbox, self.log_lines = _sandbox(examples.domains, c.allow_inner)
    self.functions: dict[str, dict[str, str]] = {}
    self.whole, self.episodes = "", False
    # What an environment said to episodes of a step, or of an evaluation.
    self.folder: pathlib.Path | None = None
    self._known, self._known_of = _Said(), -1
    self._pool: Pool | own.Rewards
    if c.verifier:
      self._pool = own.Rewards(c.verifier, timeout_s=c.timeout_s, given=given)
      for i, (name, digest) in enumerate(self._pool.digests.items()):
        field = "reward.verifier" + (f"[{i}]" if len(c.verifier) > 1 else "")
        self.functions[field] = {"name": name, "digest": digest}
      self.episodes = self._pool.episodes
      try:  # before anything is compiled
        self._examples.reply("") if self.episodes else None
      except ValueError:
        self.close()
        raise
      named = zip(c.verifier, self._pool.whole, strict=True)
      self.whole = next((name for name, whole in named if whole), "")
      self.log_lines.append(f"rewards: {', '.join(c.verifier)}")
    else:
      test_s, total_s = c.code_s
      how = {"allow_inner": c.allow_inner, "limits": Limits(test_s, total_s)}
      self._pool = Pool(
        {name: domain.verify for name, domain in DOMAINS.items()},
        parts={name: domain.part for name, domain in DOMAINS.items()},
        # A program runs at most four times; beyond that the worker hangs.
        deadline_s=4 * PATIENCE * max(total_s, MAX_TEST_S),
        jail=functools.partial(jail.Jail, **how),
      )

  def score_responses(
    self, examples: Sequence[Example], rollouts: Rollouts, *, step: Step = None
  ) -> list[list[ScoredResponse]]:
    """A score for each rollout; equal responses to a prompt are scored once.

    `step` is None in an evaluation.
    """
    rows, out = self._ask(examples, rollouts, step), []
    for example, row in zip(examples, rows, strict=True):
      found = {id(verdict): verdict for verdict in row}  # one of equal ones
      found = {i: _without_reply(verdict) for i, verdict in found.items()}
      of = {i: ScoredResponse(example.task, *v) for i, v in found.items()}
      out.append([of[id(verdict)] for verdict in row])
    return out

  def texts(self, rollouts: Rollouts) -> list[list[str]]:
    """The texts of all rollouts, [P][N]. Equal ones of a group are decoded
    once.
    """
    return self._each(rollouts, self._examples.shown)

  def _each(self, rollouts: Rollouts, text: Callable) -> list[list[str]]:
    """A text of each rollout, from its tokens and which are the policy's."""
    out, owns = [], rollouts.own if self.episodes else rollouts.mask
    for p, mask in enumerate(rollouts.mask):
      first, of, _ = rollouts.alike(p)
      cut = lambda x, m=mask, p=p, ns=first: [x[p, n][m[n]] for n in ns]
      texts = [*map(text, cut(rollouts.tokens), cut(owns))]
      out.append([texts[k] for k in of])
    return out

  def reply(
    self, examples: Sequence[Example], rollouts: Rollouts, *, step: Step = None
  ) -> Rollouts:
    """Episodes with what the environment replies to each. Those that go on are
    not `whole`; the others have ended, or have no room for the reply.
    """
    T = rollouts.tokens.shape[2]
    changed = {k: np.array(getattr(rollouts, k)) for k in _CHANGED}
    here = dataclasses.replace(rollouts, **changed)
    rows = self._ask(examples, rollouts, step)
    for (p, n), cut in np.ndenumerate(rollouts.truncated):
      verdict = rows[p][n].verdict
      if cut or verdict.reason != own.REPLY:
        continue
      begin = int(rollouts.mask[p, n].sum())
      if len(verdict.answer) > _MOST_CHARACTERS * (T - begin):
        continue
      ids = self._examples.reply(verdict.answer)
      if begin + len(ids) < T:
        at = p, n, slice(begin, begin + len(ids))
        here.tokens[at], here.logp[at], here.mask[at] = ids, types.GIVEN, True
        here.truncated[p, n] = True
    return here

  def _ask(
    self, examples: Sequence[Example], rollouts: Rollouts, step: Step
  ) -> list[list[TimedVerdict]]:
    if self.episodes:
      return self._ask_once(examples, rollouts, step)
    texts = self.texts(rollouts)
    if isinstance(self._pool, own.Rewards):
      bare = lambda text: text.removeprefix(self._examples.opened)
      both = zip(texts, examples, strict=True)
      groups = [own.Group([*map(bare, r)], example) for r, example in both]
      return self._pool.score(groups, step=step)
    groups = [*zip(texts, examples, strict=True)]
    job = lambda e, text: Job(e.domain, text, e.entry)
    jobs = {(e.id, x): job(e, x) for said, e in groups for x in said}
    scored = dict(zip(jobs, self._pool.score([*jobs.values()]), strict=True))
    return [[scored[e.id, text] for text in said] for said, e in groups]

  def _ask_once(
    self, examples: Sequence[Example], rollouts: Rollouts, step: Step
  ) -> list[list[TimedVerdict]]:
    """Verdicts on episodes. Those that are known in this step, also before a
    kill, are not asked for: a random environment would say something else.
    """
    assert isinstance(self._pool, own.Rewards)
    if step != self._known_of:
      self._known, self._known_of = self._read(step), step
    turns = lambda *episode: json.dumps(self._examples.turns(*episode))
    rows, new = self._each(rollouts, turns), dict[str, str]()
    groups = list[own.Group]()
    for row, example in zip(rows, examples, strict=True):
      of = json.dumps([example.id, [*example.messages], self._pool.digests])
      digest = lambda text, of=of: hashlib.sha256((of + text).encode())
      key = {x: digest(x).hexdigest()[:32] for x in dict.fromkeys(row)}
      known = lambda k: k in self._known or k in new
      ask = {k: x for x, k in key.items() if not known(k)}
      groups.append(own.Group([*ask.values()], example))
      new |= ask
      row[:] = [key[text] for text in row]
    found = itertools.chain(*self._pool.score(groups, step=step))
    said = dict(zip(new, found, strict=True))
    self._known |= said
    self._write(step, said, "a")
    return [[self._known[k] for k in row] for row in rows]

  def _read(self, step: Step) -> _Said:
    """What was said in this step before; begins the file of this process."""
    found = _Said()
    for path in self.folder.glob("replies.*.jsonl") if self.folder else ():
      for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last one may be cut short
          of, key, verdict, seconds = json.loads(line)
          if of == step:
            found[key] = TimedVerdict(Verdict(*verdict), seconds)
    self._write(step, found, "w")
    return found

  def _write(self, step: Step, said: _Said, mode: str) -> None:
    if self.folder is None or step is None:
      return
    self.folder.mkdir(exist_ok=True)
    path = self.folder / f"replies.{jax.process_index()}.jsonl"
    with path.open(mode) as file:
      for key, (verdict, seconds) in said.items():
        line = step, key, dataclasses.astuple(verdict), seconds
        file.write(json.dumps(line) + "\n")

  def replies(self, step: int, prompts: Prompts, made: Rollouts) -> Rollouts:
    """`reply` to what a step samples."""
    examples = [self._examples.example(step, int(i)) for i in prompts.index]
    return self.reply(examples, made, step=step)

  def scores(self, step: int, prompts: Prompts, rollouts: Rollouts) -> Scores:
    """Stage 3: verdicts, and the reward that each domain gives for them."""
    examples = [self._examples.example(step, int(i)) for i in prompts.index]
    rows = self.score_responses(examples, rollouts, step=step)
    shares = [self._examples.domain(e).reward == "score" for e in examples]
    rewards = [
      [x.verdict.score if share and x.valid else x.verdict.reward for x in row]
      for share, row in zip(shares, rows, strict=True)
    ]
    answers = [_numbered([s.verdict.answer for s in row]) for row in rows]
    return Scores(
      np.array(rewards, np.float32),
      np.array(answers, np.int32),
      np.array([[scored.valid for scored in row] for row in rows]),
      np.array(rows, object),
    )

  def replaced(self) -> collections.Counter[str]:
    """Worker processes replaced since the last call, by reason."""
    return self._pool.replaced()

  def close(self) -> None:
    """Ends the worker processes."""
    self._pool.close()


def _without_reply(found: TimedVerdict) -> TimedVerdict:
  """A reply for which there is no room may be of any length."""
  if found.verdict.reason != own.REPLY:
    return found
  return found._replace(verdict=dataclasses.replace(found.verdict, answer=""))


def _sandbox(
  domains: Sequence[str], allow_inner: bool
) -> tuple[dict[str, Any], list[str]]:
  """What is there, tried now and not when the first response comes."""
  sandbox: dict[str, Any] = {}
  log_lines = []
  needs = {DOMAINS[name].needs_jail for name in domains if name in DOMAINS}
  try:
    if "programs" in needs:
      level = jail.require(allow_inner=allow_inner)
      sandbox["programs"] = dataclasses.asdict(level)
      log_lines.append(f"jail: {jail.describe(level)}")
    if "libraries" in needs:
      sandbox["libraries"] = jail.isolation_error() or "walled"
      if sandbox["libraries"] != "walled":
        log_lines.append(f"jail: none around libraries: {sandbox['libraries']}")
  except jail.Failed as e:
    raise ValueError(str(e)) from None
  return sandbox, log_lines


def _numbered(texts: Sequence[str]) -> list[int]:
  """Equal numbers for equal texts, in order of appearance."""
  numbers: dict[str, int] = {}
  return [numbers.setdefault(text, len(numbers)) for text in texts]
