"""--mode=sample, `brorl_jax.load`, and the names of the package."""

import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import compiling
import configured
import hub_cache
import jax
import numpy as np
import pytest
import runs_for_tests as made
from compiled import compilations
from messages import mentions, refuses

import brorl_jax as bj
from brorl_jax.errors import UserError
from brorl_jax.main import sample
from brorl_jax.main.sample import Response, TextPolicy
from brorl_jax.model import huggingface
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.verdicts.base import Example

ROOT = pathlib.Path(__file__).parents[2]
SHORT, LONG = "3 + 4 =", "Calculate 3 + 4 * 2."


@pytest.fixture(scope="module")
def policy():
  return bj.load()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  c = configured.config(
    max_new_tokens=5, **{"data.domains.math.instruction": "Box it."}
  )
  return made.with_checkpoints(tmp_path_factory.mktemp("a") / "run", c, (1, 3))


def texts(responses):
  return [one.text for one in responses]


# ------------------------------------------------------------------ the package


def test_a_revision_of_a_model_is_loaded(tmp_path, monkeypatch, policy):
  hub_cache.made(tmp_path, monkeypatch, v2=huggingface.ASSETS)
  loaded = bj.load("maker/model@v2")
  jax.tree.map(np.testing.assert_array_equal, loaded.params, policy.params)


@pytest.mark.ci
def test_the_package_loads_nothing_before_a_name_is_used():
  code = ("import sys, brorl_jax as bj; before = {*sys.modules}; "
    "assert {*dir(bj)} == {*bj.__all__, '__version__'}; "
    "assert not before & {'jax', 'numpy', 'transformers', 'matplotlib'}; "
    "bj.verify; assert 'jax' not in sys.modules; "
    "bj.load; assert 'jax' in sys.modules")  # fmt: skip
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_of_the_package_are_those_of_its_modules():
  assert bj.sample is sampler.sample
  assert bj.load is sample.load
  assert bj.verify("math", r"\boxed{1/2}", answer="0.5").status == "pass"
  with pytest.raises(AttributeError, match="'brorl_jax' has no attribute 'lo"):
    bj.lod  # noqa: B018


# ---------------------------------------------------------------- in a notebook


@pytest.mark.slow
def test_questions_of_other_lengths_compile_nothing(policy):
  sizes = [len(policy.tokenizer.render(policy.posed(q))) for q in (SHORT, LONG)]
  assert sizes[0] < sizes[1] <= 16
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
  how = dict(max_new_tokens=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
  out = bj.sample(policy.policy, policy.params,
    [ids], jax.random.key(3), n=16, stop_ids=stop, **how)  # fmt: skip
  found = policy.sample(LONG, 16, seed=3, **how)
  for n, one in enumerate(found):
    assert one.tokens == out.tokens[0, n][np.asarray(out.mask[0, n])].tolist()
    assert one.logp == pytest.approx(float(out.logp[0, n].sum()), abs=1e-5)
    assert one.truncated == (one.tokens[-1] not in stop)
    assert [one.text] == policy.tokenizer.decode([one.tokens])
  assert len({*texts(found)}) > 1


@pytest.mark.ci
def test_the_first_of_many_are_those_of_few(policy):
  many = policy.sample(SHORT, n=8)
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
  monkeypatch.setattr(sample, "TOGETHER", 13)
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
    raise ValueError("the chat template fails: System role not supported")

  monkeypatch.setattr(policy.tokenizer, "render", render)
  said = "prompt 0 ... chat template ... System role not supported"
  with refuses(ValueError, said):
    policy.sample(SHORT)


@pytest.mark.parametrize("prompt, how, message", [
  (SHORT, {"n": 0}, "n = 0 ... at least 1"),
  (SHORT, {"max_new_tokens": 0}, "max_new_tokens = 0 ... at least 1"),
  (SHORT, {"temperature": -1.0}, "temperature = -1.0"),
  (SHORT, {"top_p": 0.0}, "top_p = 0.0"),
  ([SHORT, "3" * 40_000], {},
    "prompt 1 ... 40001 tokens ... max_new_tokens = 256 ... 32768"),
  ([[{"role": "user"}]], {}, "prompt 0 ... 'role' ... 'content'"),
  ({"role": "user", "content": SHORT}, {}, "use [message]"),
])  # fmt: skip
def test_what_cannot_be_answered_is_refused(policy, prompt, how, message):
  with compilations() as seen, pytest.raises(ValueError) as e:
    policy.sample(prompt, **how)
  assert mentions(str(e.value), message) and "\n" not in str(e.value)
  assert seen == []


# ---------------------------------------------------------------------- a run


@pytest.mark.ci
@pytest.mark.parametrize("where, step, want",
  [("{}", None, 3), ("{}", 1, 1), ("{}/checkpoints/1", None, 1)])  # fmt: skip
def test_a_run_is_loaded_with_what_it_was_asked(run, policy, where, step, want):
  found = bj.load(where.format(run), step=step)
  assert (found.step, found.max_new_tokens) == (want, 5)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, y * (1 + 0.01 * want)),
    found.params, policy.params,
  )  # fmt: skip
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
  assert posed == [{"role": "system", "content": "Be brief."},
    {"role": "user", "content": SHORT}]  # fmt: skip
  assert other._rendered(0, SHORT, 5) == found._rendered(0, posed, 5)


def test_parameters_may_be_of_half_the_size(run):
  for where in (run, huggingface.ASSETS):
    found = bj.load(where, dtype="bfloat16")
    assert found.policy.dtype == "bfloat16"
    assert {x.dtype.name for x in jax.tree.leaves(found.params)} == {"bfloat16"}


@pytest.mark.parametrize("where, step, message", [
  ("{tmp}/nowhere", None, "directory"), ("{tmp}", None, "config.json ... read"),
  ("", 1, "step = 1 ... ''"), ("{run}/checkpoints/1", 1, "step = 1 ... '"),
  ("{run}", 2, "checkpoint 2 ... 1, 3"),
])  # fmt: skip
def test_what_is_no_policy_is_refused(run, tmp_path, where, step, message):
  with refuses(ValueError, message):
    bj.load(where.format(tmp=tmp_path, run=run), step=step)


# ---------------------------------------------------------------- the command


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def talk(capsys):
  usual = dict(prompt=[], prompts=None, n=1, temperature=1.0)
  usual["max_new_tokens"] = None

  def of(where="", **given):
    sample.run(str(where), **usual | given)
    return capsys.readouterr()

  return of


def lines(text):
  return [json.loads(line) for line in text.splitlines()]


def canned(monkeypatch, *answers, cut=False):
  made_of = lambda text: Response(text, [5, 2], -1.5, cut)
  monkeypatch.setattr(TextPolicy, "each",
    lambda self, prompts, n, **how: ([made_of(one) for one in answers[:n]]
      for _ in prompts))  # fmt: skip


# -------------------------------------------------------------- where it reads


def test_a_prompt_is_answered_in_lines_of_json(talk, policy):
  said = talk(prompt=[SHORT, "Add 1 and 2."], n=3, temperature=0.7)
  assert said.err == "the embedded policy\n"
  want = policy.sample([SHORT, "Add 1 and 2."], n=3, temperature=0.7)
  assert lines(said.out) == [{"prompt": prompt,
      "sample": n, "response": one.text,
      "tokens": len(one.tokens), "logp": one.logp, "truncated": one.truncated}
    for prompt, each in zip([SHORT, "Add 1 and 2."], want, strict=True)
    for n, one in enumerate(each)]  # fmt: skip


@pytest.mark.ci
def test_lines_are_answered(talk, policy, tmp_path, monkeypatch):
  """Of a file; and of standard input, where a prompt twice has new draws."""
  (tmp_path / "a.txt").write_text(f"{SHORT}\n\n  \n{SHORT}\n")
  monkeypatch.setattr(sys, "stdin", io.StringIO(f"{SHORT}\n\n{SHORT}"))
  file = lines(talk(prompts=str(tmp_path / "a.txt"), n=4).out)
  typed = lines(talk(n=4).out)
  want = [*policy.each([SHORT], 4), *policy.each([SHORT], 4, first=1)]
  want = [one.text for each in want for one in each]
  assert [one["response"] for one in typed] == want
  assert [one["response"] for one in file] == want and want[:4] != want[4:]


def test_responses_to_examples_are_judged(talk, run, tmp_path, monkeypatch):
  examples = [
    {"id": "a", "domain": "math", "prompt": "What is 1 + 1?", "answer": "2"},
    {"id": "b", "domain": "math", "prompt": "What is 1 + 2?", "answer": "3"},
  ]
  path = tmp_path / "sums.jsonl"
  path.write_text("".join(json.dumps(one) + "\n" for one in examples))
  canned(monkeypatch, r"\boxed{2}", "two")
  said = talk(run, prompts=str(path), n=2)
  found = lines(said.out)
  assert [one["verdict"] for one in found] == ["pass", "fail", "fail", "fail"]
  assert mentions(said.err.splitlines()[1], "1 of 4 ... (25.0%)")
  assert found[2] == {"prompt": "What is 1 + 2?\nBox it.", "sample": 0,
    "response": r"\boxed{2}", "tokens": 2, "logp": -1.5, "truncated": False,
    "id": "b", "domain": "math", "task": "sums", "gold": "3", "answer": "2",
    "verdict": "fail", "reason": found[2]["reason"], "score": 0.0}  # fmt: skip
  assert found[2]["reason"]


@pytest.mark.parametrize("fields, verdict", [
  ({"data.fields": "answer:solution", "data.domain": "math"}, "pass"),
  ({"reward.verifier": ("mine.py:score",)}, None),  # nobody judges here
])  # fmt: skip
def test_a_file_is_read_as_the_run_read_its_own(
  talk, tmp_path, monkeypatch, fields, verdict
):
  c = configured.config(**fields)
  run = made.with_checkpoints(tmp_path / "run", c, (1,))
  path = tmp_path / "a.jsonl"
  path.write_text('{"prompt": "1 + 1?", "solution": "2", "level": 3}\n')
  canned(monkeypatch, r"\boxed{2}")
  said = talk(run, prompts=str(path))
  (line,) = lines(said.out)
  assert line["response"] == r"\boxed{2}" and line.get("verdict") == verdict
  assert line.get("gold") == (verdict and "2")
  assert said.err.startswith(f"{run}, step 1\n")


# ----------------------------------------------------------------- a terminal


def test_on_a_terminal_responses_are_numbered(talk, run, tmp_path, monkeypatch):
  path = tmp_path / "sums.jsonl"
  path.write_text(
    '{"id": "a", "domain": "math", "prompt": "1 + 1?", "answer": "2"}\n'
  )
  canned(monkeypatch, r"\boxed{2}", "two", cut=True)
  terminal = Terminal()
  monkeypatch.setattr(sys, "stdout", terminal)
  talk(run, prompts=str(path), n=2)
  cut = "[cut at 2 tokens]"
  assert terminal.getvalue() == (
    f"> 1 + 1?\nBox it.\n[1] \\boxed{{2}}\n{cut}\n[pass]\n"
    f"[2] two\n{cut}\n[fail: no answer]\n"
  )


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize("given, message", [
  ({"prompt": ["x"], "prompts": "y.txt"}, "--prompt ... --prompts"),
  ({"prompts": "{tmp}/y.txt"}, "--prompts={tmp}/y.txt ... No such file"),
  ({"prompts": "{tmp}/blank.txt"}, "--prompts={tmp}/blank.txt ... blank"),
  ({"prompts": "{tmp}/bad.jsonl"}, "{tmp}/bad.jsonl, line 1, field 'answer': "),
  ({"prompt": ["x"], "n": 0}, "n = 0 ... at least 1"),
  ({"prompt": ["x"], "temperature": -1.0}, "temperature = -1.0"),
  ({"where": "/no/where", "prompt": ["x"]}, "'/no/where' ... checkpoint"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(talk, tmp_path, given, message):
  (tmp_path / "blank.txt").write_text(" \n\n")
  (tmp_path / "bad.jsonl").write_text(
    '{"id": "a", "domain": "math", "prompt": "1 + 1?", "answer": 2.5}\n'
  )
  put = lambda x: x.format(tmp=tmp_path) if isinstance(x, str) else x
  with pytest.raises(UserError) as e:
    talk(**{name: put(value) for name, value in given.items()})
  line = str(e.value)
  assert mentions(line, message.format(tmp=tmp_path)) and "\n" not in line


def command(*words, **how):
  return subprocess.Popen(
    [sys.executable, "-m", "brorl_jax.main", *words], cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": compiling.QUICK}, stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, **how,
  )  # fmt: skip


@pytest.mark.ci
def test_the_command_answers_until_it_is_interrupted(run):
  process = command("--mode=sample", f"--workdir={run}", "--n=2")
  process.stdin.write(f"{SHORT}\n")
  found = [json.loads(process.stdout.readline()) for _ in range(2)]
  said = [(one["prompt"], one["sample"]) for one in found]
  assert said == [(SHORT, 0), (SHORT, 1)]
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert err == f"{run}, step 3\ninterrupted\n"


@pytest.mark.slow
def test_who_reads_may_have_enough():
  process = command("--mode=sample")
  process.stdin.write(f"{SHORT}\n")
  process.stdout.readline()
  process.stdout.close()
  process.stdin.write(f"{SHORT}\n")
  process.stdin.close()
  assert process.wait(timeout=60) == 0
  with process.stderr as said:
    assert said.read() == "the embedded policy\n"
