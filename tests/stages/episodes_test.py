"""Episodes: an environment replies, and rollouts go on behind its tokens."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import time

import chex
import configured
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from messages import refuses
from small_decoders import KEY, RECALL, STOP, Recall, numbered, spec

from brorl_jax.learner import packing, theory, update
from brorl_jax.model import tokenizer
from brorl_jax.rollout import dynamic_sampling, stream
from brorl_jax.rollout.dynamic_sampling import RoundPlan, collect, played
from brorl_jax.stages import scoring
from brorl_jax.types import GIVEN, Groups, Interrupted, Rollouts, Scores
from brorl_jax.verdicts import own, pool
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.sandbox import jail

N, T, TURNS, SAID = 4, 24, 3, [4, 5]


def reply(prompts, rollouts):
  """Replies `SAID` to each of the first turns, if a token may follow it."""
  new = {f.name: np.array(getattr(rollouts, f.name))
         for f in dataclasses.fields(Rollouts) if f.name != "age"}  # fmt: skip
  for p, n in np.ndindex(rollouts.truncated.shape):
    count = int(rollouts.mask[p, n].sum())
    ends = (rollouts.tokens[p, n] == STOP) & rollouts.own[p, n]
    room = count + len(SAID) < new["tokens"].shape[2]
    if not rollouts.truncated[p, n] and ends.sum() < TURNS and room:
      at = p, n, slice(count, count + len(SAID))
      new["tokens"][at], new["logp"][at], new["mask"][at] = SAID, GIVEN, True
      new["truncated"][p, n] = True
  return Rollouts(**new)


def simply(prompt, p, n, T):
  """One episode, token by token: tokens, log-probabilities, the policy's."""
  key = jax.random.fold_in(jax.random.fold_in(KEY, p), n)
  uniform = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))
  uniform, out, ended = np.asarray(uniform(jnp.arange(T))), [], 0
  while len(out) < T:
    said = [token for token, *_ in out]
    *_, logits = Recall().logits(RECALL, prompt, [*said, 0])
    logp = np.asarray(jax.nn.log_softmax(logits))
    mass = np.cumsum(np.exp(logp))
    token = int(np.argmax(mass > uniform[len(out)] * mass[-1]))
    out.append((token, logp[token], True))
    if token == STOP:
      ended += 1
      if ended == TURNS or len(out) + len(SAID) >= T:
        break
      out += [(token, GIVEN, False) for token in SAID]
  return map(np.array, zip(*out, strict=True))


def sampled(params=RECALL, **changes):
  how = spec(n=N, max_new_tokens=T, **{"lanes": 2, "slots": 3} | changes)
  return lambda feed: stream.stream(
    how, params, feed, KEY, places=3, turns=True
  )


DECODERS = tiers.some([
  {}, {"groups": 2}, {"policy": Recall(pool_columns=4)},
  {"policy": Recall(pool_columns=4), "blocks": 8},  # some begin again
  {"max_new_tokens": 150},  # pages, compacted
], desk=3)  # fmt: skip


@pytest.mark.parametrize("changes", DECODERS)
def test_episodes_are_those_of_a_loop_over_tokens(changes):
  prompts = numbered(5)
  most = changes.get("max_new_tokens", T)
  changes = {k: v for k, v in changes.items() if k != "max_new_tokens"}
  how = spec(n=N, max_new_tokens=most, lanes=2, slots=3, **changes)
  of = functools.partial(stream.stream, key=KEY, places=3, turns=True)
  got = played(lambda feed: of(how, RECALL, feed), reply, prompts)
  assert got.whole.all() and (got.mask & ~got.own).any()
  for p, n in np.ndindex(5, N):
    tokens, logp, mine = simply([p % 6], p, n, most)
    mask = got.mask[p, n]
    np.testing.assert_array_equal(got.tokens[p, n][mask], tokens)
    np.testing.assert_allclose(got.logp[p, n][mask], logp, atol=2e-6)
    np.testing.assert_array_equal(got.own[p, n][mask], mine)
    assert got.truncated[p, n] == (tokens[-1] != STOP)


def score(prompts, rollouts):
  reward = (rollouts.tokens.sum(axis=2) % 2).astype(np.float32)
  valid = np.ones(reward.shape, bool)
  return Scores(
    reward, reward.astype(np.int32), valid, np.full(reward.shape, 0)
  )


def collected(answer=reply, groups=1, **more):
  of = lambda index: jax.tree.map(lambda x: x[np.array(index)], numbered(20))
  mixed = lambda groups: groups.scores.reward.std(axis=1) > 0
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(dynamic_sampling, "check_invalid", lambda _: None)
    return collect(
      sampled(groups=groups), score, mixed, of, range(20), target=4,
      plan=RoundPlan((N,)), reply=answer, **more,
    )  # fmt: skip


def test_a_step_keeps_the_episodes_of_its_prompts_also_if_it_was_interrupted():
  """Wherever: also between an episode's turns, from a file."""
  whole = collected()
  index = whole.groups.prompts.index
  want = played(
    sampled(), reply, jax.tree.map(lambda x: x[index], numbered(20))
  )
  for name in ("tokens", "logp", "mask", "truncated"):
    got = getattr(whole.groups.rollouts, name)
    np.testing.assert_array_equal(got, getattr(want, name), err_msg=name)
  between = 0
  for moment in range(1, 40, 3):
    asked = iter(range(1000))
    stopping = lambda asked=asked, moment=moment: next(asked) >= moment
    try:
      collected(usual=0.8, stopping=stopping)
      break
    except Interrupted as e:
      before = e.finished
    between += any(not x.whole.all() for x in before.values())
    again = collected(usual=0.8, before=before)
    kept = [x.kept_groups().rollouts.tokens for x in (again, whole)]
    np.testing.assert_array_equal(*kept)
  assert between


def test_what_decodes_together_depends_on_no_clock():
  """On a CPU, however long the environment takes."""

  def late(*made):
    time.sleep(random.SystemRandom().random() / 20)
    return reply(*made)

  a, b = (collected(answer=x, groups=2).groups for x in (reply, late))
  chex.assert_trees_all_equal(a.rollouts, b.rollouts)  # slot-steps too


def test_means_and_masses_are_over_the_tokens_of_the_policy():
  made = jax.device_get(played(sampled(), reply, numbered(3)))
  groups = Groups(numbered(3), made, score(numbered(3), made))
  seen = []
  update.minibatches(
    groups, groups.scores.reward, groups.scores.valid,
    packing.Layout(rows=2, blocks=2, length=T, prompt=1), count=1, seed=(0, 0),
    scale=lambda length: seen.append(length),
  )  # fmt: skip
  np.testing.assert_array_equal(seen[0], made.own.sum(axis=2))
  of = groups.prompts, made, groups.scores.reward
  probed = theory.probe(*of, count=3, rows=N, tokens=T)
  first = [made.distinct(p)[0] for p in range(3)]
  want = [made.own[p, n].sum() for p, ns in enumerate(first) for n in ns]
  assert sorted(probed.mask.sum(axis=2).ravel())[-len(want) :] == sorted(want)


def test_what_an_environment_wrote_is_read_and_not_trained_on():
  """In blocks and in trees, and with any mean."""
  made = jax.device_get(played(sampled(), reply, numbered(3)))
  advantage = np.arange(1.0, 1 + made.truncated.size, dtype=np.float32)
  source = packing.Source(numbered(3), made, advantage.reshape(-1, N))
  layout = packing.Layout(rows=2, blocks=2, length=T, prompt=1)
  distinct = [(p, made.distinct(p)) for p in range(3)]
  want = {}
  for p, n in np.ndindex(3, N):
    want[*made.tokens[p, n][made.mask[p, n]]] = int(made.own[p, n].sum())
  for plan in (
    packing.plan_blocks(source, distinct, layout),
    packing.plan_trees(source, distinct, (4, 128)),
  ):
    found, total = {}, 0
    for batch in plan.batches():
      of = batch.weight > 0
      total += (batch.weight * batch.mask.sum(axis=-1)).sum()
      for tokens, mask, logp in zip(
        batch.response[of], batch.mask[of], batch.logp_sampled[of], strict=True
      ):
        assert (logp[mask] != GIVEN).all() and (logp[mask] < 0).any()
        text = next(k for k in want if [*k] == tokens[: len(k)].tolist())
        found[text] = int(mask.sum())
    assert found == want and total == made.own.sum()


# The tokens of a reply, and what an environment is asked.

ASSETS = tokenizer.ASSETS
CHAT = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def text(template=None):
  own_one = template and tokenizer.Template("t", template)
  return tokenizer.Tokenizer(ASSETS, own_one)


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_reply_is_posed_as_the_template_poses_a_second_question(template):
  of, said, asked = text(template), "12", " Why? é\n<b>"
  first = [{"role": "user", "content": "3 * 4"}]
  ids = [*of.render(first), *of.encode(said), *of.stop_ids]
  ids += of.reply(asked)
  assert of.replied(of.reply(asked)) == asked
  turns = [{"role": "assistant", "content": said},
           {"role": "user", "content": asked}]  # fmt: skip
  whole = of._tokenizer.decode(ids)
  if template:  # one without marks of turns says no end of the first
    assert whole == of._tokenizer.decode(of.render([*first, *turns]))
  else:
    assert whole == f"3 * 4<|im_start|>12<|im_end|>{asked}<|im_start|>"


@pytest.mark.parametrize("template", [
  "{{ messages[-1].content }}",  # says nothing behind a question
  "{{ messages[0].content }}{% if messages[1] %}{{ raise_exception('one turn') "
  "}}{% endif %}",
])  # fmt: skip
def test_a_template_of_one_turn_is_refused(template):
  with refuses(ValueError, "its chat template poses no second turn; give one"):
    text(template).reply("more")


def environment(messages, example):
  """Two turns; then the number in the last one, over the answer."""
  environment.asked.append((messages, example["answer"]))
  last = messages[-1]["content"]
  if last == "crash":
    raise RuntimeError("no")
  if last == "long":
    return "x" * 100
  return "more?" if len(messages) == 2 else float(last) / 10


environment.asked = []


@functools.cache
def examples(folder):
  path = folder / "rows.jsonl"
  rows = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(30)]
  path.write_text("\n".join(map(json.dumps, rows)))
  c = configured.config(files=(str(path),), verifier=("python:environment",))
  c = dataclasses.replace(c, data=dataclasses.replace(c.data, puzzles=False))
  return c, configured.examples(c, text())


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
  c, some = examples(tmp_path_factory.mktemp("rows"))
  given = {"python:environment": environment}
  made = scoring.Scorer(c.reward, some, given)
  yield made
  made.close()


def said(*texts, T=24, ends=True):
  """Rollouts [1,N] of one turn each."""
  tokens = np.zeros((1, len(texts), T), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for n, one in enumerate(texts):
    ids = [*text().encode(one), *text().stop_ids]
    tokens[0, n, : len(ids)], mask[0, n, : len(ids)] = ids, True
  logp = np.where(mask, -1.0, 0.0).astype(np.float32)
  cut = np.full((1, len(texts)), not ends)
  return Rollouts(tokens, logp, mask, cut, np.ones(1, np.float32))


def goes_on(rollouts, texts):
  """Behind what was replied, the policy's next turns."""
  out = jax.tree.map(np.array, rollouts)
  for n, one in enumerate(texts):
    if not out.whole[0, n]:
      ids = [*text().encode(one), *text().stop_ids]
      start = int(out.mask[0, n].sum())
      at = 0, n, slice(start, start + len(ids))
      out.tokens[at], out.logp[at], out.mask[at] = ids, -1.0, True
      out.truncated[0, n] = False
  return out


def test_an_environment_is_asked_once_about_each_turn(scorer):
  environment.asked.clear()
  prompts = scorer._examples.prompts(1, [0])
  example = scorer._examples.example(1, 0)
  first = said("7", "8", "7", "crash", "long")
  after = scorer.replies(1, prompts, first)
  assert after.whole.tolist() == [[False, False, False, True, True]]
  ids = text().reply("more?")
  at = slice(2, 2 + len(ids))
  np.testing.assert_array_equal(after.tokens[0, :3, at], [ids] * 3)
  assert (after.logp[0, :3, at] == GIVEN).all()
  np.testing.assert_array_equal(after.tokens[0, 3:], first.tokens[0, 3:])
  second = goes_on(after, ["10", "5", "3", "", ""])
  last = scorer.replies(1, prompts, second)
  assert last.whole.all()
  chex.assert_trees_all_equal(last, second)
  scores = scorer.scores(1, prompts, last)
  np.testing.assert_allclose(scores.reward, [[1.0, 0.5, 0.3, 0, 0]], rtol=1e-6)
  assert scores.valid.tolist() == [[True, True, True, False, True]]
  reasons = [x.verdict.reason for x in scores.responses[0]]
  assert scores.responses[0, 4].verdict.answer == ""
  assert reasons[4] == own.REPLY and "RuntimeError: no" in reasons[3]
  asked = [[m["content"] for m in seen] for seen, _ in environment.asked]
  question = example.question
  turns = [["7"], ["8"], ["crash"], ["long"]]
  turns += [["7", "more?", "10"], ["8", "more?", "5"], ["7", "more?", "3"]]
  assert sorted(asked) == sorted([question, *turn] for turn in turns)
  roles = [[m["role"] for m in seen] for seen, _ in environment.asked]
  assert roles[-1] == ["user", "assistant", "user", "assistant"]
  assert {answer for _, answer in environment.asked} == {
    example.columns["answer"]
  }
  assert scorer.texts(last)[0][0] == "7\n[reply] more?\n10"


def test_an_episode_that_is_cut_or_has_no_room_has_ended(scorer):
  example = [scorer._examples.example(1, 0)]
  assert scorer.reply(example, said("7", ends=False)).whole.tolist() == [
    [False]
  ]
  size = 2 + len(text().reply("more?"))
  for room, whole in ((0, True), (1, False)):
    after = scorer.reply(example, said("7", T=size + room))
    assert after.whole.tolist() == [[whole]]
    assert int(after.mask.sum()) == (2 if whole else size)


def test_what_was_said_in_a_step_is_not_said_again(tmp_path):
  """Of two candidates with one example, and by a start after a kill."""
  (folder := tmp_path / "rows").mkdir()
  c, some = examples(folder)
  count = iter(range(100))

  def environment(messages):
    return str(next(count)) if len(messages) == 2 else next(count) / 100

  def start():
    given = {"python:environment": environment}
    made = scoring.Scorer(c.reward, some, given)
    made.folder = tmp_path / "sampled"
    return made

  with contextlib.closing(start()) as first:
    twice = [some.example(1, 0)] * 2
    both = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), said("7"))
    after = first.reply(twice, both, step=1)
    whole = goes_on(jax.tree.map(lambda x: x[:1], after), ["5"])
    scores = first.score_responses(twice[:1], whole, step=1)
    assert next(count) == 2
  path = tmp_path / "sampled" / "replies.0.jsonl"
  path.write_text(path.read_text() + "[1, ")  # cut short
  with contextlib.closing(start()) as second:
    chex.assert_trees_all_equal(second.reply(twice, both, step=1), after)
    again = second.score_responses(twice[:1], whole, step=1)
    assert again[0][0].verdict == scores[0][0].verdict
    assert next(count) == 3
    second.reply(twice[:1], said("7"), step=2)
    assert next(count) == 5
  assert len(path.read_text().splitlines()) == 1


def test_a_reply_far_beyond_the_room_is_not_read(scorer, monkeypatch):
  monkeypatch.setattr(scorer._examples, "reply", None)
  monkeypatch.setattr(own, "REPLY", "below 1")  # of a fail that says nothing
  long = pool.TimedVerdict(Verdict("fail", 0.0, "below 1", "x" * 800), 0.0)
  monkeypatch.setattr(scorer, "_ask", lambda *_: [[long]])
  chex.assert_trees_all_equal(scorer.reply([], said("7")), said("7"))


FILE = """
def step(messages, example, step):
  if len(messages) == 2:
    return "\\ud800 " + example["answer"]
  assert messages[2] == {"role": "user", "content": "no"}
  return messages[3]["content"] == "8"
async def later(messages):
  return "on" if len(messages) < 4 else 1
def score(response):
  return 1
"""


def test_environments_in_processes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(FILE)
  asked = ({"role": "user", "content": "2 + 6?"},)
  one = own.Example("a/1", "own", "sums", asked, {}, {"answer": "8"})
  turns = [json.dumps(x) for x in (["7"], ["7", "no", "8"], ["7", "no", "9"])]
  for name, want in (
    ("step", [("fail", 0.0, "? 8"), ("pass", 1.0, "8"), ("fail", 0.0, "9")]),
    ("later", [("fail", 0.0, "on"), ("pass", 1.0, "8"), ("pass", 1.0, "9")]),
  ):
    with own.Rewards([f"mine.py:{name}"], workers=1) as some:
      assert some.episodes and some.whole == [False]
      (found,) = some.score([own.Group(turns, one)], step=3)
    got = [(x.verdict.status, x.verdict.score, x.verdict.answer) for x in found]
    assert got == want and found[0].verdict.reason == own.REPLY
  with refuses(ValueError, "one takes messages; use it alone"):
    own.Rewards(["mine.py:step", "mine.py:score"], workers=1)


def test_the_environment_of_the_readme_runs_a_program(tmp_path):
  page = pathlib.Path(own.__file__).parent / "README.md"
  code = page.read_text().partition("# my_environment.py\n")[2]
  space = {}
  exec(code.partition("\n```\n")[0], space)
  chat = lambda *said: [{"role": "user", "content": text} for text in said]
  ask = lambda text: space["step"](chat("6 * 7?", text), {"answer": "42"})
  assert ask("```python\nprint(6 * 7)\n```") == "42\n"
  assert ask("```python\nprint(1)\n1 / 0\n```") == "1\nZeroDivisionError"
  assert ask("```python\n1 +\n```") == "syntax error: SyntaxError in line 1"
  assert (ask("42"), ask("41")) == (1.0, 0.0)
  assert jail.run_python("while True: pass", seconds=0.2) == "time-out"
  assert jail.run_python("print(input()[::-1])", "abc\n") == "cba\n"
