"""Tests of brorl_jax/main/sample.py and of the names of the package."""

import dataclasses
import subprocess
import sys

import configured
import jax
import numpy as np
import pytest
import runs_for_tests as made
from compiled import compilations
from messages import mentions

import brorl_jax as bj
from brorl_jax.main import sample
from brorl_jax.model import huggingface
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.verdicts.base import Example

SHORT, LONG = "3 + 4 =", "Calculate 3 + 4 * 2."


@pytest.fixture(scope="module")
def policy():
  return bj.load()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with checkpoints 1 and 3, which asked for boxes."""
  c = configured.config(
    max_new_tokens=5, **{"data.domains.math.instruction": "Box it."}
  )
  return made.with_checkpoints(tmp_path_factory.mktemp("a") / "run", c, (1, 3))


def texts(responses):
  return [one.text for one in responses]


# ------------------------------------------------------------------ the package


@pytest.mark.ci
def test_the_package_loads_nothing_before_a_name_is_used():
  code = (
    "import sys, brorl_jax as bj; before = {*sys.modules}; "
    "assert {'load', 'sample', 'verify', 'rl'} - {*dir(bj)} == {'rl'}; "
    "assert not before & {'jax', 'numpy', 'transformers', 'matplotlib'}; "
    "bj.verify; assert 'jax' not in sys.modules; "
    "bj.load; assert 'jax' in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_of_the_package_are_those_of_its_modules():
  assert bj.sample is sampler.sample
  assert bj.load is sample.load
  assert bj.verify("math", r"\boxed{1/2}", answer="0.5").status == "pass"
  with pytest.raises(
    AttributeError, match="'brorl_jax' has no attribute 'lod'"
  ):
    bj.lod  # noqa: B018


# ---------------------------------------------------------------- in a notebook


@pytest.mark.slow
def test_questions_of_other_lengths_compile_nothing(policy):
  lengths = [
    len(policy.tokenizer.render(policy.posed(q))) for q in (SHORT, LONG)
  ]
  assert lengths[0] < lengths[1] <= 16
  first = policy.sample(SHORT, n=32)
  with compilations() as seen:
    other = policy.sample(LONG, n=32)
    draws = policy.sample(SHORT, n=32, seed=1)
    again = policy.sample(SHORT, n=32)
  assert seen == []
  assert len(first) == 32 and first == again
  assert texts(first) != texts(draws) and texts(first) != texts(other)
  with compilations() as seen:
    policy.sample("3 + 4 = " * 10, n=32)
  assert seen != []  # it has more than 16 tokens, and the count counts


def test_it_answers_with_what_the_sampler_draws(policy):
  """And the padding of prompts decides nothing."""
  ids = policy.tokenizer.render([{"role": "user", "content": LONG}])
  stop = policy.tokenizer.stop_ids
  out = bj.sample(
    policy.policy,
    policy.params,
    [ids],
    jax.random.key(3),
    n=16,
    max_new_tokens=4,
    stop_ids=stop,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
  )
  found = policy.sample(
    LONG,
    16,
    seed=3,
    max_new_tokens=4,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
  )
  for n, one in enumerate(found):
    kept = np.asarray(out.mask[0, n])
    assert one.tokens == out.tokens[0, n][kept].tolist()
    assert one.logp == pytest.approx(float(out.logp[0, n].sum()), abs=1e-5)
    assert one.truncated == (one.tokens[-1] not in stop)
    assert [one.text] == policy.tokenizer.decode([one.tokens])
  assert len({*texts(found)}) > 1


@pytest.mark.ci
def test_the_first_of_many_are_those_of_few(policy):
  many = policy.sample(SHORT, n=32)
  few = policy.sample(SHORT, n=4)
  assert texts(many[:4]) == texts(few)
  logp = lambda responses: [one.logp for one in responses]
  np.testing.assert_allclose(logp(many[:4]), logp(few), atol=1e-5)


@pytest.mark.ci
def test_several_prompts_are_answered_in_their_order(policy):
  """Three are made as two and one; each by its number."""
  prompts = [f"{i} + 4 =" for i in range(3)]
  found = policy.sample(prompts, n=4)
  assert [len(each) for each in found] == [4] * 3
  for number in range(3):
    (alone,) = policy.each([prompts[number]], 4, first=number)
    assert texts(alone) == texts(found[number])
  conversations = [policy.posed(prompt) for prompt in prompts]
  assert policy.sample(conversations, n=4) == found
  assert texts(policy.sample(conversations[0], n=4)) == texts(found[0])
  assert policy.sample([], n=4) == []


@pytest.mark.ci
def test_responses_come_as_they_are_done(policy, monkeypatch):
  asked, rollouts = [], sampler.rollouts

  def spy(*args, **how):
    asked.append(args[2].index.tolist())
    return rollouts(*args, **how)

  monkeypatch.setattr(sampler, "rollouts", spy)
  monkeypatch.setattr(sample, "_TOGETHER", 13)
  each = policy.each([SHORT] * 5, 4, first=10)
  next(each)
  assert asked == [[10, 11]]  # 13 // 4, as a power of two
  assert len([*each]) == 4
  assert asked == [[10, 11], [12, 13], [14]]


def test_a_response_is_cut_at_the_limit(policy):
  (one,) = policy.sample(LONG, max_new_tokens=1)
  assert one.truncated and len(one.tokens) == 1
  one = dataclasses.replace(policy, max_new_tokens=1).sample(LONG)[0]
  assert one.truncated and len(one.tokens) == 1


def with_memory(text, memory_bytes):
  """The same policy on devices of this size."""
  target = dataclasses.replace(text.policy.target, memory_bytes=memory_bytes)
  policy = dataclasses.replace(text.policy, target=target)
  return dataclasses.replace(text, policy=policy)


@pytest.mark.ci
def test_where_less_fits_less_is_made_together(policy, monkeypatch):
  prompts = [f"{i} + 4 =" for i in range(2)]
  want = policy.sample(prompts, n=4)
  tried, rollouts = [], sample.memory.rollouts

  def fits(load, *args):
    tried.append(load.prompts)
    if load.prompts > 1:
      raise sample.memory.TooLarge("not so many")
    return rollouts(load, *args)

  monkeypatch.setattr(sample.memory, "rollouts", fits)
  found = policy.sample(prompts, n=4)
  assert tried == [2, 1]
  assert [texts(each) for each in found] == [texts(each) for each in want]
  policy = with_memory(policy, 2**20)
  with pytest.raises(ValueError, match=r"MiB"):
    policy.sample(prompts, n=4)


def test_512_responses_are_not_refused_on_a_laptop(policy):
  policy = with_memory(policy, 2**30)
  fits = policy._fitted(1, 512, 16, 256, SamplingParams())
  assert (fits.load.prompts, fits.slots, fits.lanes) == (1, 512, 1)


def test_what_a_template_refuses_is_told(policy, monkeypatch):
  def render(messages):
    raise RuntimeError("System role\n not supported")

  monkeypatch.setattr(policy.tokenizer, "render", render)
  with pytest.raises(ValueError) as e:
    policy.sample(SHORT)
  assert mentions(
    str(e.value), "prompt 0 ... chat template ... System role not supported"
  )


@pytest.mark.parametrize(
  "prompt, how, message",
  [
    (SHORT, {"n": 0}, "n = 0 ... at least 1"),
    (SHORT, {"max_new_tokens": 0}, "max_new_tokens = 0 ... at least 1"),
    (SHORT, {"temperature": -1.0}, "temperature = -1.0"),
    (SHORT, {"top_p": 0.0}, "top_p = 0.0"),
    (
      [SHORT, "3" * 40_000],
      {},
      "prompt 1 ... 40001 tokens ... max_new_tokens = 256 ... 32768",
    ),
    ([[{"role": "user"}]], {}, "prompt 0 ... 'role' ... 'content'"),
    ({"role": "user", "content": SHORT}, {}, "use [message]"),
  ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(
  policy, prompt, how, message
):
  with compilations() as seen, pytest.raises(ValueError) as e:
    policy.sample(prompt, **how)
  assert mentions(str(e.value), message) and "\n" not in str(e.value)
  assert seen == []


# ---------------------------------------------------------------------- a run


def test_the_embedded_policy_is_what_nothing_names(policy):
  _, params = huggingface.load(huggingface.ASSETS)
  jax.tree.map(np.testing.assert_array_equal, policy.params, params)
  assert policy.step is None and policy.posed(SHORT) == [
    {"role": "user", "content": SHORT}
  ]


@pytest.mark.ci
@pytest.mark.parametrize(
  "where, step, want",
  [("{}", None, 3), ("{}", 1, 1), ("{}/checkpoints/1", None, 1)],
)
def test_a_run_is_loaded_with_what_it_was_asked(run, policy, where, step, want):
  found = bj.load(where.format(run), step=step)
  assert (found.step, found.max_new_tokens) == (want, 5)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, y * (1 + 0.01 * want)),
    found.params,
    policy.params,
  )
  device = {jax.devices()[0]}
  assert all(x.devices() == device for x in jax.tree.leaves(found.params))
  assert texts(found.sample(SHORT, temperature=0.0))


def test_a_question_is_posed_as_the_run_posed_its_own(run, policy):
  found = bj.load(run)
  user = lambda text: [{"role": "user", "content": text}]
  assert found.posed(SHORT) == user(SHORT)
  assert found.posed(SHORT, "math") == user(f"{SHORT}\nBox it.")
  example = Example("a", "math", "a", user("What?"), {})
  assert found.posed(example) == user("What?\nBox it.")
  other = dataclasses.replace(found, system="Be brief.")
  posed = other.posed(SHORT)
  assert posed == [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": SHORT},
  ]
  assert other.sample(SHORT, n=4) == found.sample(posed, n=4)


def test_parameters_may_be_of_half_the_size(run):
  for where in (run, huggingface.ASSETS):
    found = bj.load(where, dtype="bfloat16")
    assert found.policy.dtype == "bfloat16"
    assert {x.dtype.name for x in jax.tree.leaves(found.params)} == {"bfloat16"}


@pytest.mark.parametrize(
  "where, step, message",
  [
    ("{tmp}/nowhere", None, "directory"),
    ("{tmp}", None, "config.json ... read"),
    ("", 1, "step = 1 ... ''"),
    ("{run}/checkpoints/1", 1, "step = 1 ... '"),
    ("{run}", 2, "checkpoint 2 ... 1, 3"),
  ],
)
def test_what_is_no_policy_is_refused_in_a_line(
  run, tmp_path, where, step, message
):
  with pytest.raises(ValueError) as e:
    bj.load(where.format(tmp=tmp_path, run=run), step=step)
  assert mentions(str(e.value), message)
  assert "\n" not in str(e.value)


@pytest.mark.slow
def test_a_run_is_no_model_directory(run):
  with pytest.raises(ValueError) as e:
    huggingface.load(run)
  assert mentions(
    str(e.value), f"{run} ... brorl_jax.load({str(run)!r}) ... --mode=export"
  )
