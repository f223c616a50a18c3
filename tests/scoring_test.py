"""Tests of brorl_jax/main/scoring.py."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest

from brorl_jax import sampler, tokenizer, types
from brorl_jax.main import scoring
from brorl_jax.main.examples import Examples
from brorl_jax.main.scoring import Judge
from brorl_jax.tasks import code, gym, verifiers
from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.sandbox import levels
from configs import base

ASSETS = pathlib.Path(tokenizer.__file__).parent / "assets"


@functools.cache
def text():
  return tokenizer.Tokenizer(ASSETS)


@functools.cache
def examples():
  c = base.get_config()
  c.n, c.eval_prompts = 16, 4
  return Examples(c, text())


@pytest.fixture(scope="module")
def judge():
  judge = Judge(base.get_config(), examples())
  yield judge
  judge.close()


def rollouts(responses, T=6):
  """Rollouts that say these texts, the first of each prompt cut short."""
  tokens = np.zeros((len(responses), len(responses[0]), T), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for p, row in enumerate(responses):
    for n, said in enumerate(row):
      ids = [*text().encode(said), text().stop_ids[0]][:T]
      tokens[p, n, : len(ids)] = ids
      mask[p, n, : len(ids)] = True
  return types.Rollouts(
    tokens=tokens,
    logp=np.zeros(tokens.shape, np.float32),
    mask=mask,
    truncated=np.zeros(tokens.shape[:2], bool),
    slot_steps=np.ones(len(responses), np.float32),
  )


def test_scores_are_the_verifiers_word_for_word(judge):
  prompts = examples().prompts(3, range(8))
  answers = [
    examples().example(3, int(i)).entry["answer"] for i in prompts.index
  ]
  said = [[a, "7", a, "no", a + "1", "7"] for a in answers]
  scores = judge.scores(3, prompts, rollouts(said))
  got, answer = scores.reward, scores.answer
  want = [
    [gym.verify(x, examples().example(3, i).entry).reward for x in row]
    for i, row in enumerate(said)
  ]
  assert got.tolist() == want
  assert got[:, 0].tolist() == got[:, 2].tolist() == [1.0] * 8
  assert got[:, 4].tolist() == [0.0] * 8
  for row, numbers in zip(said, answer, strict=True):
    texts = dict(zip(numbers.tolist(), row, strict=True))
    assert [texts[n] for n in numbers.tolist()] == row
    assert len(set(numbers.tolist())) == len(set(row))


def test_answers_are_numbered_by_what_verifiers_read(judge):
  """Two responses that say the same differ in words, not in the answer."""
  prompts = examples().prompts(3, [0])
  said = [["7", "<answer>7</answer>", "8", "7", "9"]]
  told = rollouts(said, T=24)
  answer = judge.scores(3, prompts, told).answer
  assert answer.tolist() == [[0, 0, 1, 0, 2]]


class Fake:
  """In the place of the pool: says what it is told, and what it was asked."""

  def __init__(self, verdict):
    self._verdict, self.jobs = verdict, []

  def judge(self, jobs):
    self.jobs += jobs
    return [(self._verdict(job.response), 0.25) for job in jobs]


def with_pool(monkeypatch, judge, verdict):
  fake = Fake(verdict)
  monkeypatch.setattr(judge, "_pool", fake)
  return fake


def test_equal_responses_are_judged_once(monkeypatch, judge):
  fake = with_pool(monkeypatch, judge, lambda r: Verdict("pass", 1.0, "", r))
  some = [examples().example(3, 0), examples().example(3, 1)]
  rows = judge.judged(some, rollouts([["1", "2", "1", "1", "2", "3"]] * 2))
  assert [job.response for job in fake.jobs] == ["1", "2", "3"] * 2
  assert [[one.verdict.answer for one in row] for row in rows] == [
    ["1", "2", "1", "1", "2", "3"]
  ] * 2
  assert {one.task for one in rows[1]} == {some[1].task}
  assert {one.seconds for one in rows[0]} == {0.25}


def test_what_a_verifier_failed_on_is_not_valid(monkeypatch, judge):
  def verdict(response):
    status = {"1": "pass", "2": "fail"}.get(response, "invalid")
    return Verdict(status, 0.5, "verifier failed: late", response)

  with_pool(monkeypatch, judge, verdict)
  got = judge.scores(3, examples().prompts(3, [0]), rollouts([["1", "2", "3"]]))
  assert got.valid.tolist() == [[True, True, False]]
  assert got.reward.tolist() == [[1.0, 0.0, 0.0]]
  assert got.judged[0, 2].verdict.reason == "verifier failed: late"


def test_a_domain_may_pay_the_share_that_is_right(monkeypatch):
  c = base.get_config()
  c.domains.gym.reward = "score"
  judge = Judge(c, examples())
  verdicts = {"1": "pass", "2": "fail", "3": "invalid"}
  score = {"1": 1.0, "2": 0.75, "3": 0.75}
  with_pool(monkeypatch, judge, lambda r: Verdict(verdicts[r], score[r], "", r))
  got = judge.scores(3, examples().prompts(3, [0]), rollouts([["1", "2", "3"]]))
  assert got.reward.tolist() == [[1.0, 0.75, 0.0]]


def test_rollouts_of_the_embedded_policy_are_judged(judge):
  from brorl_jax import hf

  policy, params = hf.load(ASSETS)
  prompts = examples().prompts(1, range(8))
  out = sampler.rollouts(
    policy,
    params,
    prompts,
    jax.random.key(0),
    n=16,
    max_new_tokens=6,
    behaviour=sampler.Behaviour(),
    stop_ids=text().stop_ids,
    slots=8,
  )
  reward = judge.scores(1, prompts, jax.device_get(out)).reward
  assert 0.02 < reward.mean() < 0.7


def test_walls_are_tried_for_what_is_judged(monkeypatch):
  asked = []
  monkeypatch.setattr(scoring.jail, "walls", lambda: asked.append(1) or "")
  assert scoring._walls(["gym"], False) == ({}, []) and not asked
  walled = {"libraries": "walled"}
  assert scoring._walls(["gym", "math"], False) == (walled, [])
  monkeypatch.setattr(scoring.jail, "walls", lambda: "no Landlock")
  assert scoring._walls(["stem"], False) == (
    {"libraries": "no Landlock"},
    ["jail: none around libraries: no Landlock"],
  )


def test_the_level_of_the_jail_is_said_and_inner_is_asked_for(monkeypatch):
  level = levels.Level("inner", "no bwrap", "/p", "3.11", 7, "x86_64", None)
  monkeypatch.setattr(levels, "probe", lambda: level)
  with pytest.raises(ValueError, match=r"no bwrap.*allow_inner=True.*threads"):
    scoring._walls(["code"], False)
  monkeypatch.setattr(scoring.jail, "walls", lambda: "")
  walls, (said,) = scoring._walls(["code"], True)
  assert walls["programs"]["name"] == "inner"
  assert (
    said.startswith("jail: programs run within the inner walls")
    and "no bwrap" in said
  )
  full = dataclasses.replace(level, name="full", bubblewrap="/usr/bin/bwrap")
  monkeypatch.setattr(levels, "probe", lambda: full)
  _, (said,) = scoring._walls(["code"], False)
  assert said == "jail: programs run in a full jail, with Python 3.11"


def test_programs_without_a_jail_are_refused_in_one_line(monkeypatch):
  def require(*, allow_inner):
    raise scoring.jail.Failed("no jail for untrusted code here: install it")

  monkeypatch.setattr(scoring.levels, "require", require)
  with pytest.raises(ValueError, match=r"^no jail .*: install it$"):
    scoring._walls(["code"], False)


def test_the_limits_of_programs_are_those_of_the_config(monkeypatch):
  c = base.get_config()
  c.code_test_s, c.code_total_s = 0.25, 1.5
  seen = []

  def verify(program, tests, *, limits, jail):
    seen.append((limits.test_s, limits.total_s))
    return Verdict("pass", 1.0, "", program)

  monkeypatch.setattr(code, "verify", verify)
  table = verifiers.table(scoring.limits(c))
  entry = {"tests": {"inputs": ["1"], "outputs": ["1"]}}
  for own in ({}, {"time_limit": 1.0}, {"time_limit": 4}):
    table["code"]("```\nprint(1)\n```", {**entry, **own}, None)
  assert seen == [(0.25, 1.5), (1.0, 1.5), (4.0, 4.0)]
