"""Tests of brorl_jax/stages/scoring.py."""

import dataclasses
import functools
import json
import pathlib

import configured
import numpy as np
import pytest
import scored

from brorl_jax.model import tokenizer
from brorl_jax.stages import scoring
from brorl_jax.stages.scoring import Scorer
from brorl_jax.verdicts import gym, pool
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.sandbox import jail

ASSETS = pathlib.Path(tokenizer.__file__).parents[1] / "assets"


@functools.cache
def text():
  return tokenizer.Tokenizer(ASSETS)


@functools.cache
def examples(**changes):
  small = dict(n=16, eval_prompts=4)
  return configured.examples(configured.config(**small | changes), text())


@pytest.fixture(scope="module")
def scorer():
  scorer = Scorer(configured.config().reward, examples())
  yield scorer
  scorer.close()


def rollouts(responses, T=6):
  """Rollouts that say these texts, the first of each prompt cut short."""
  tokens = np.zeros((len(responses), len(responses[0]), T), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for p, row in enumerate(responses):
    for n, said in enumerate(row):
      ids = [*text().encode(said), text().stop_ids[0]][:T]
      tokens[p, n, : len(ids)] = ids
      mask[p, n, : len(ids)] = True
  return scored.rollouts(tokens, mask)


def test_scores_are_the_verifiers_word_for_word(scorer):
  prompts = examples().prompts(3, range(8))
  answers = [examples().example(3, i).entry["answer"] for i in [*prompts.index]]
  said = [[a, "7", a, "no", a + "1", "7"] for a in answers]
  scores = scorer.scores(3, prompts, rollouts(said))
  got, answer = scores.reward, scores.answer
  want = [[gym.verify(x, examples().example(3, i).entry).reward for x in row]
    for i, row in enumerate(said)]  # fmt: skip
  assert got.tolist() == want
  assert got[:, 0].tolist() == got[:, 2].tolist() == [1.0] * 8
  assert got[:, 4].tolist() == [0.0] * 8
  for row, numbers in zip(said, answer, strict=True):
    texts = dict(zip(numbers.tolist(), row, strict=True))
    assert [texts[n] for n in numbers.tolist()] == row
    assert len(set(numbers.tolist())) == len(set(row))


def test_answers_are_numbered_by_what_verifiers_read(scorer):
  """Two responses that say the same differ in words, not in the answer."""
  prompts = examples().prompts(3, [0])
  told = rollouts([["7", "<answer>7</answer>", "8", "7", "9"]], T=24)
  assert scorer.scores(3, prompts, told).answer.tolist() == [[0, 0, 1, 0, 2]]


class Fake:
  def __init__(self, verdict):
    self._verdict, self.jobs = verdict, []

  def score(self, jobs):
    self.jobs += jobs
    return [pool.TimedVerdict(self._verdict(j.response), 0.25) for j in jobs]


def with_pool(monkeypatch, scorer, verdict):
  fake = Fake(verdict)
  monkeypatch.setattr(scorer, "_pool", fake)
  return fake


def test_equal_responses_are_judged_once(monkeypatch, scorer):
  fake = with_pool(monkeypatch, scorer, lambda r: Verdict("pass", 1.0, "", r))
  some = [examples().example(3, 0), examples().example(3, 1)]
  said = [["1", "2", "1", "1", "2", "3"]] * 2
  rows = scorer.score_responses(some, rollouts(said))
  assert [job.response for job in fake.jobs] == ["1", "2", "3"] * 2
  assert [[one.verdict.answer for one in row] for row in rows] == said
  assert {one.task for one in rows[1]} == {some[1].task}
  assert {one.seconds for one in rows[0]} == {0.25}


def test_what_a_verifier_failed_on_is_not_valid(monkeypatch, scorer):
  def verdict(response):
    status = {"1": "pass", "2": "fail"}.get(response, "invalid")
    return Verdict(status, 0.5, "verifier failed: late", response)

  with_pool(monkeypatch, scorer, verdict)
  prompts, said = examples().prompts(3, [0]), rollouts([["1", "2", "3"]])
  got = scorer.scores(3, prompts, said)
  assert got.valid.tolist() == [[True, True, False]]
  assert got.reward.tolist() == [[1.0, 0.0, 0.0]]
  assert got.responses[0, 2].verdict.reason == "verifier failed: late"


def test_a_domain_may_pay_the_share_that_is_right(monkeypatch):
  pays = {"data.domains.gym.reward": "score"}
  scorer = Scorer(configured.config().reward, examples(**pays))
  said = {"1": ("pass", 1.0), "2": ("fail", 0.75), "3": ("invalid", 0.75)}
  with_pool(monkeypatch, scorer, lambda r: Verdict(*said[r], "", r))
  got = scorer.scores(3, examples().prompts(3, [0]), rollouts([[*said]]))
  assert got.reward.tolist() == [[1.0, 0.75, 0.0]]


def test_walls_are_tried_for_what_is_judged(monkeypatch):
  asked = []
  monkeypatch.setattr(
    scoring.jail, "isolation_error", lambda: asked.append(1) or ""
  )
  assert scoring._sandbox(["gym"], False) == ({}, []) and not asked
  walled = {"libraries": "walled"}
  assert scoring._sandbox(["gym", "math"], False) == (walled, [])
  monkeypatch.setattr(scoring.jail, "isolation_error", lambda: "no Landlock")
  assert scoring._sandbox(["stem"], False) == ({"libraries": "no Landlock"},
    ["jail: none around libraries: no Landlock"])  # fmt: skip


def test_the_level_of_the_jail_is_said_and_inner_is_asked_for(monkeypatch):
  level = jail.Level("inner", "no bwrap", "/p", "3.11", 7, "x86_64", None)
  monkeypatch.setattr(jail, "measure", lambda: level)
  with pytest.raises(ValueError, match="allow_inner"):
    scoring._sandbox(["code"], False)
  monkeypatch.setattr(scoring.jail, "isolation_error", lambda: "")
  walls, (said,) = scoring._sandbox(["code"], True)
  assert walls["programs"]["name"] == "inner"
  assert said.startswith("jail: programs run in the weaker sandbox")
  assert "no bwrap" in said
  full = dataclasses.replace(level, name="full", bubblewrap="/usr/bin/bwrap")
  monkeypatch.setattr(jail, "measure", lambda: full)
  _, (said,) = scoring._sandbox(["code"], False)
  assert said == "jail: programs run in a full sandbox with Python 3.11"


@pytest.mark.parametrize(
  "total_s, deadline_s",
  # Four runs, each at a tenth of a CPU, of a program or of its longest test.
  [(1.5, 4 * 10 * 60.0), (100.0, 4 * 10 * 100.0)],
)
def test_the_limits_of_programs_are_those_of_the_config(total_s, deadline_s):
  c = configured.config(code_s=(0.25, total_s)).reward
  scorer = Scorer(c, examples())
  try:
    limits = scorer._pool._jail().limits
    assert scorer._pool._deadline_s == deadline_s
  finally:
    scorer.close()
  assert (limits.test_s, limits.total_s) == (0.25, total_s)


def test_own_rewards_are_what_advantages_see(tmp_path):
  """A group sees equal responses too; the step is that of the training."""
  file, data = tmp_path / "mine.py", tmp_path / "odd.jsonl"
  file.write_text(
    "from brorl_jax.verdicts.base import Verdict\n"
    "def score(responses, example, step):\n"
    "  out = [Verdict('pass' if r == '7' else 'fail', len(responses) / 8)\n"
    "         for r in responses]\n"
    "  out[-1] = step if step is not None else -1\n"
    "  out[0] = None if example['bad'] else out[0]\n"
    "  return out\n"
  )
  lines = [{"prompt": f"{i}?", "bad": i == 3} for i in range(40)]
  data.write_text("".join(json.dumps(line) + "\n" for line in lines))
  fields = {"data.files": (str(data),), "data.heldout_one_in": 4}
  fields["reward.verifier"] = (f"{file}:score",)
  c = configured.config(**fields)
  thinks = tokenizer.Template("t", "{{ messages[0].content }}<think>")
  some = configured.examples(c, tokenizer.Tokenizer(ASSETS, thinks))
  assert some.domains == ["own"] and not some.families
  asked = [some.example(5, p).question for p in range(40)]
  bad = next(p for p in range(40) if asked[p] in ("3?", "0?"))
  scorer = Scorer(c.reward, some)
  try:
    assert scorer.sandbox == {}
    assert scorer.log_lines == [f"rewards: {file}:score"]
    name = scorer.functions["reward.verifier"]
    assert name["name"] == f"{file}:score" and len(name["digest"]) == 32
    said = [["7", "7", "8", "9"]]
    prompts = some.prompts(5, [bad])
    scores = scorer.scores(5, prompts, rollouts(said))
    one = [some.example(5, bad)]
    (evaluated,) = scorer.score_responses(one, rollouts(said))
    assert scorer.texts(rollouts(said))[0][0] == "<think>7"
  finally:
    scorer.close()
  failed = some.example(5, bad).columns["bad"]
  assert scores.reward.tolist() == [[0.0 if failed else 0.5, 0.5, 0.5, 5.0]]
  assert scores.valid.tolist() == [[not failed, True, True, True]]
  assert evaluated[-1].verdict.score == -1.0
  assert evaluated[-1].task == "odd"
  assert evaluated[1].verdict.status == "pass"  # of "7", without "<think>"


def test_own_rewards_without_files_are_refused(tmp_path):
  c = configured.config(**{"reward.verifier": ("mine.py:score",)})
  with pytest.raises(ValueError, match="scores lines of files"):
    configured.examples(c, text())
