"""Tests of main/sample.py: --mode=sample."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import compiling
import configured
import pytest
import runs_for_tests as made
from messages import mentions

import brorl_jax as bj
from brorl_jax.errors import UserError
from brorl_jax.main import sample
from brorl_jax.main.sample import Response, TextPolicy

ROOT = pathlib.Path(__file__).parents[2]
SHORT = "3 + 4 ="


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture(scope="module")
def policy():
  return bj.load()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  c = configured.config(
    max_new_tokens=5, **{"data.domains.math.instruction": "Box it."}
  )
  return made.with_checkpoints(tmp_path_factory.mktemp("a") / "run", c, (3,))


@pytest.fixture
def talk(capsys):
  """Runs the mode with flags, and returns what it prints."""
  usual = dict(prompt=[], prompts=None, n=1, temperature=1.0)
  usual["max_new_tokens"] = None

  def of(where="", **given):
    sample.run(str(where), **usual | given)
    return capsys.readouterr()

  return of


def lines(text):
  return [json.loads(line) for line in text.splitlines()]


def canned(monkeypatch, *answers):
  """Every prompt is answered by these."""
  made_of = lambda text: Response(text, [5, 2], -1.5, False)
  monkeypatch.setattr(
    TextPolicy,
    "each",
    lambda self, prompts, n, **how: (
      [made_of(one) for one in answers[:n]] for _ in prompts
    ),
  )


# -------------------------------------------------------------- where it reads


def test_a_prompt_is_answered_in_lines_of_json(talk, policy):
  said = talk(prompt=[SHORT, "Add 1 and 2."], n=3, temperature=0.7)
  assert said.err == "the embedded policy\n"
  want = policy.sample([SHORT, "Add 1 and 2."], n=3, temperature=0.7)
  assert lines(said.out) == [
    {
      "prompt": prompt,
      "sample": n,
      "response": one.text,
      "tokens": len(one.tokens),
      "logp": one.logp,
      "truncated": one.truncated,
    }
    for prompt, each in zip([SHORT, "Add 1 and 2."], want, strict=True)
    for n, one in enumerate(each)
  ]


@pytest.mark.ci
def test_a_run_answers_as_long_as_it_did(talk, run):
  said = talk(f"{run}/checkpoints/3", prompt=[SHORT], max_new_tokens=1)
  assert lines(said.out)[0]["tokens"] == 1


@pytest.mark.ci
def test_a_text_has_a_prompt_in_each_line(talk, policy, tmp_path):
  (tmp_path / "a.txt").write_text(f"{SHORT}\n\n  \nAdd 1 and 2.\n")
  said = talk(prompts=str(tmp_path / "a.txt"), temperature=0.0)
  found = [(one["prompt"], one["response"]) for one in lines(said.out)]
  asked = [SHORT, "Add 1 and 2."]
  want = policy.sample(asked, temperature=0.0)
  assert found == [(p, r.text) for p, (r,) in zip(asked, want, strict=True)]


@pytest.mark.ci
def test_standard_input_is_answered_line_by_line(talk, policy, monkeypatch):
  """A prompt that is asked again is another one: its draws are new."""
  monkeypatch.setattr(sys, "stdin", io.StringIO(f"{SHORT}\n\n{SHORT}"))
  said = talk(n=8)
  want = [*policy.each([SHORT], 8), *policy.each([SHORT], 8, first=1)]
  want = [one.text for each in want for one in each]
  assert [one["response"] for one in lines(said.out)] == want
  assert want[:8] != want[8:]


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
  assert found[2] == {
    "prompt": "What is 1 + 2?\nBox it.",
    "sample": 0,
    "response": r"\boxed{2}",
    "tokens": 2,
    "logp": -1.5,
    "truncated": False,
    "id": "b",
    "domain": "math",
    "task": "sums",
    "gold": "3",
    "answer": "2",
    "verdict": "fail",
    "reason": found[2]["reason"],
    "score": 0.0,
  }
  assert found[2]["reason"]


def test_a_file_is_read_as_the_run_read_its_own(talk, tmp_path, monkeypatch):
  c = configured.config(
    **{"data.fields": "prompt:question,answer:solution", "data.domain": "math"}
  )
  run = made.with_checkpoints(tmp_path / "run", c, (1,))
  path = tmp_path / "a.jsonl"
  path.write_text('{"question": "1 + 1?", "solution": "2", "level": 3}\n')
  canned(monkeypatch, r"\boxed{2}")
  (line,) = lines(talk(run, prompts=str(path)).out)
  assert (line["gold"], line["verdict"]) == ("2", "pass")


def test_a_run_of_own_rewards_answers_any_lines_unjudged(
  talk, tmp_path, monkeypatch
):
  c = configured.config(**{"reward.verifier": ("mine.py:score",)})
  run = made.with_checkpoints(tmp_path / "run", c, (1,))
  path = tmp_path / "a.jsonl"
  path.write_text('{"prompt": "1 + 1?", "level": 3}\n')
  canned(monkeypatch, "two")
  said = talk(run, prompts=str(path))
  (line,) = lines(said.out)
  assert line["response"] == "two" and "verdict" not in line
  assert said.err == f"{run}, step 1\n"


# ----------------------------------------------------------------- a terminal


def test_on_a_terminal_several_responses_are_numbered(
  talk, run, tmp_path, monkeypatch
):
  path = tmp_path / "sums.jsonl"
  path.write_text(
    '{"id": "a", "domain": "math", "prompt": "1 + 1?", "answer": "2"}\n'
  )
  canned(monkeypatch, r"\boxed{2}", "two")
  terminal = Terminal()
  monkeypatch.setattr(sys, "stdout", terminal)
  talk(run, prompts=str(path), n=2)
  assert terminal.getvalue() == (
    "> 1 + 1?\nBox it.\n[1] \\boxed{2}\n[pass]\n[2] two\n[fail: no answer]\n"
  )


@pytest.mark.ci
def test_on_a_terminal_it_says_what_was_cut(talk, monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr(sys, "stdout", terminal)
  talk(prompt=[SHORT], max_new_tokens=1, temperature=0.0)
  assert terminal.getvalue().endswith("\n[cut at 1 tokens]\n")


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
  "given, message",
  [
    ({"prompt": ["x"], "prompts": "y.txt"}, "--prompt ... --prompts"),
    ({"prompts": "{tmp}/y.txt"}, "--prompts={tmp}/y.txt ... No such file"),
    ({"prompts": "{tmp}/blank.txt"}, "--prompts={tmp}/blank.txt ... blank"),
    (
      {"prompts": "{tmp}/bad.jsonl"},
      "{tmp}/bad.jsonl, line 1, field 'answer': ",
    ),
    ({"prompt": ["x"], "n": 0}, "n = 0 ... at least 1"),
    ({"prompt": ["x"], "temperature": -1.0}, "temperature = -1.0"),
    ({"where": "/no/where", "prompt": ["x"]}, "'/no/where' ... checkpoint"),
  ],
)
def test_what_cannot_be_asked_is_refused(talk, tmp_path, given, message):
  (tmp_path / "blank.txt").write_text(" \n\n")
  (tmp_path / "bad.jsonl").write_text(
    '{"id": "a", "domain": "math", "prompt": "1 + 1?", "answer": 2.5}\n'
  )
  put = lambda x: x.format(tmp=tmp_path) if isinstance(x, str) else x
  with pytest.raises(UserError) as e:
    talk(**{name: put(value) for name, value in given.items()})
  assert mentions(str(e.value), message.format(tmp=tmp_path))
  assert "\n" not in str(e.value)


def command(*words, **how):
  return subprocess.Popen(
    [sys.executable, "-m", "brorl_jax.main", *words],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": compiling.QUICK},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    bufsize=1,
    **how,
  )


@pytest.mark.parametrize(
  "words, message",
  [
    (
      ["--mode=report", "--workdir=a", "--n=2"],
      "--n ... --mode=sample ... --mode=report",
    ),
    (
      ["--mode=sample", "--config=configs/smoke.py"],
      "--mode=sample ... --config",
    ),
    (
      ["--mode=sample", "--workdir=a", "--workdir=b"],
      "--workdir ... 2 times ... --mode=sample ... --mode=report",
    ),
  ],
)
def test_flags_of_other_modes_are_refused(refused, words, message):
  assert mentions(refused(*words), message)


@pytest.mark.ci
def test_the_command_answers_until_it_is_interrupted(run):
  process = command("--mode=sample", f"--workdir={run}", "--n=2")
  process.stdin.write(f"{SHORT}\n")
  found = [json.loads(process.stdout.readline()) for _ in range(2)]
  assert [(one["prompt"], one["sample"]) for one in found] == [
    (SHORT, 0),
    (SHORT, 1),
  ]
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
