"""Functions of a user by name, and the rewards among them."""

import asyncio
import fractions
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from messages import mentions, refuses

from brorl_jax.data import dataset
from brorl_jax.data.schema import Form
from brorl_jax.verdicts import own
from brorl_jax.verdicts.base import Example, Verdict

ASKED = ({"role": "user", "content": "2 + 6?"},)


def example(**columns):
  return Example("a/1", "own", "sums", ASKED, {}, {"answer": "8"} | columns)


@pytest.fixture
def file(tmp_path, monkeypatch):
  """Writes the user's file; names are as from the folder that it lies in."""
  monkeypatch.chdir(tmp_path)

  def write(text, name="mine.py"):
    (tmp_path / name).write_text(text)
    return name

  return write


def verdicts(function, responses, columns=None, step=3):
  text = json.dumps(columns or {"answer": "8"})
  calls = [responses] if function.whole else [[r] for r in responses]
  asked = [own.Asked(0, call, text, step) for call in calls]
  return [verdict for one in asked for verdict in own.verdicts(function, one)]


# Names.

TABLE = {"ppo": 1, "gspo": 2}


def refused(name):
  with pytest.raises(ValueError) as error:
    own.find(name, TABLE, what="config.loss.kind")
  text = str(error.value)
  assert "\n" not in text and text.startswith("config.loss.kind = ")
  return text


def test_a_name_of_the_table_or_of_a_package():
  assert own.find("gspo", TABLE, what="x") == (2, "")
  found = own.find("os.path:join", TABLE, what="x")
  assert found.value("a", "b") == "a/b" and len(found.digest) == 32
  assert mentions(refused("gpso"), "'gpso' ... ppo, gspo ... gspo?")
  assert mentions(refused("no_such_module:f"), "ModuleNotFoundError")


def test_a_function_of_a_file_with_a_neighbour(tmp_path):
  (tmp_path / "neighbour_of_mine.py").write_text("HALF = 0.5\n")
  file = tmp_path / "mine.py"
  text = "from neighbour_of_mine import HALF\ndef f(x):\n  return x * HALF\n"
  file.write_text(text)
  found = own.find(f"{file}:f", TABLE, what="x")
  assert found.value(3.0) == 1.5
  other = tmp_path / "other.py"
  other.write_text(text + "\n")
  assert own.find(f"{other}:f", TABLE, what="x").digest != found.digest


def test_a_file_may_define_a_dataclass(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("from __future__ import annotations\nimport dataclasses\n"
    "@dataclasses.dataclass\nclass A:\n  x: int = 1\n")  # fmt: skip
  assert own.find(f"{file}:A", TABLE, what="x").value().x == 1


def test_what_is_wrong_with_a_file_is_one_line_with_its_place(tmp_path):
  file = tmp_path / "mine.py"
  assert mentions(refused(f"{file}:f"), "mine.py does not exist")
  file.write_text("def score(): pass\n")
  assert mentions(refused(f"{file}:scoer"), "function 'scoer' ... score")
  bad = tmp_path / "bad.py"
  bad.write_text("x = 1\n\nraise RuntimeError('two\\nlines')\n")
  assert mentions(refused(f"{bad}:f"), "line 3: RuntimeError: two lines")
  bad = tmp_path / "exits.py"
  bad.write_text("import sys\nsys.exit(3)\n")
  assert "line 2: SystemExit: 3" in refused(f"{bad}:f")
  bad = tmp_path / "torn.py"
  bad.write_text("def f(:\n")
  assert "SyntaxError: invalid syntax" in refused(f"{bad}:f")
  missing = tmp_path / "mien.py"
  assert mentions(refused(f"{missing}:f"), "did you mean mine.py")


# The form of a function, and what it returns; in this process.


@pytest.mark.parametrize("signature, got", [
  ("response", "r"), ("response, example", "re"), ("response, step", "rs"),
  ("response, step, example", "res"),
  ("response, *, example, step, other=1", "res"),
  ("responses", "R"), ("responses, example, step", "Res"),
])  # fmt: skip
def test_parameters_are_told_by_their_names(file, signature, got):
  file(f"def score({signature}):\n" "  here = locals()\n"
    "  seen = ('R' if here.get('responses') == ['8', '8'] else 'r')\n"
    "  seen += 'e' if here.get('example') == {'answer': '8'} else ''\n"
    "  seen += 's' if here.get('step') == 3 else ''\n"
    f"  good = seen == {got!r}\n"
    "  return [good] * 2 if 'responses' in here else good\n")  # fmt: skip
  found = verdicts(own.load("mine.py:score"), ["8", "8"])
  assert [one.status for one in found] == ["pass", "pass"], found


@pytest.mark.parametrize("text, why", [
  ("def score(answer): ...", "(answer)"), ("def score(): ...", "()"),
  ("def score(response, gold): ...", "gold"), ("score = int", "takes"),
  ("score = 1", "'score'"),
  ("import absent_xyz", "line 1: ModuleNotFoundError"),
  ("raise SystemExit(2)", "line 1: SystemExit: 2"), ("x = (", "SyntaxError"),
])  # fmt: skip
def test_what_is_no_reward_is_refused(file, text, why):
  name = f"{file(text)}:score"
  with refuses(ValueError, f"config.reward.verifier = '{name}' ... {why}"):
    own.load(name)


class Scalar:
  """As a tensor of no axes: what `float` reads."""

  ndim = 0

  def __float__(self):
    return 0.25


def constant(value, whole=False):
  call = lambda: value
  plain = (lambda responses: call()) if whole else (lambda response: call())
  return own.Function("mine.py:f", plain, whole, frozenset(), "")


@pytest.mark.parametrize("value, score", [
  (True, 1.0), (False, 0.0), (2, 2.0), (-0.5, -0.5), (0.999, 0.999),
  (np.float32(0.5), 0.5), (np.int64(1), 1.0), (np.bool_(True), 1.0),
  (np.array(0.5), 0.5), (fractions.Fraction(1, 4), 0.25), (Scalar(), 0.25),
])  # fmt: skip
def test_numbers_of_all_kinds_are_scores(value, score):
  (found,) = verdicts(constant(value), ["8"])
  assert found.score == score and type(found.score) is float
  right = ("pass", "") if score >= 1.0 else ("fail", "below 1")
  assert (found.status, found.reason) == right
  assert verdicts(constant([value] * 2, whole=True), ["8", "8"]) == [found] * 2


@pytest.mark.parametrize("value, why", [
  ("1.0", "'1.0' ... number"), (b"1", "returned b'1'; return a number"),
  (bytearray(b"1"), "return a number"),
  ([1.0], "returned [1.0]; return a number"), ({}, "{} ... number"),
  (1j, "1j ... number"), (np.ones(1), "array([1.]) ... number"),
  (10**400, "return a number"), (float("nan"), "nan ... finite"),
  (1e39, "1e+39 ... at most 1e+12"), (float("-inf"), "-inf ... finite"),
  (Verdict("right", 1.0), "'right'"),
  (Verdict("pass", float("nan")), "nan ... finite"),
  (Verdict("pass", None), "None ... number"),
  (Verdict("fail", 0.0, None), "reason None ... text"),
  (Verdict("fail", 0.0, "", 8), "8 ... answer ... text"),
])  # fmt: skip
def test_what_is_no_score_is_invalid(value, why):
  (found,) = verdicts(constant(value), ["8"])
  assert found.status == "invalid" and found.score == 0.0
  assert mentions(found.reason, "mine.py:f ... reward ... line")
  assert mentions(found.reason, why) and "\n" not in found.reason
  assert found.code == "reward failed"
  assert verdicts(constant([1.0, value], whole=True), ["8", "8"])[1] == found


def test_a_verdict_is_taken_as_it_is():
  given = Verdict("fail", 0.5, "wrong\nunit", "8 m")
  (found,) = verdicts(constant(given), ["x"])
  assert found == Verdict("fail", 0.5, "wrong unit", "8 m")
  (found,) = verdicts(constant(Verdict("pass", 3.0)), ["x" * 2000])
  assert found == Verdict("pass", 3.0, "", "x" * own.MAX_ANSWER)
  (own_invalid,) = verdicts(constant(Verdict("invalid", 0.0, "late")), ["x"])
  assert own_invalid.status == "invalid" and own_invalid.reason == "late"


@pytest.mark.parametrize("value, why", [
  ([1.0], "1 values ... 2 responses"), ([1.0] * 3, "3 values ... 2"),
  (1.0, "1.0 ... of 2"), ("11", "'11' ... of 2"), (None, "None ... of 2"),
  ({"a": 1, "b": 2}, "list of 2"), ((1.0, 0.0), ""),
  (np.array([1.0, 0.0]), ""), (iter([1, 0]), ""),
])  # fmt: skip
def test_a_group_needs_a_value_for_each_response(value, why):
  found = verdicts(constant(value, whole=True), ["8", "9"])
  if not why:
    assert [(v.score, v.answer) for v in found] == [(1.0, "8"), (0.0, "9")]
    return
  assert [one.status for one in found] == ["invalid"] * 2
  assert all(mentions(one.reason, why) for one in found)


def test_what_a_call_does_to_its_example_is_not_seen_by_the_next(file):
  file("def score(response, example):\n" "  example['tests'].append(1)\n"
    "  return len(example['tests'])\n")  # fmt: skip
  found = verdicts(own.load("mine.py:score"), ["8", "9"], {"tests": []})
  assert [one.score for one in found] == [1.0, 1.0]


# Processes.


def judged(names, responses, step=3, columns=None, **options):
  options = {"workers": 1, "timeout_s": 20.0} | options
  with own.Rewards(names, **options) as some:
    group = own.Group(responses, example(**(columns or {})))
    (found,) = some.score([group], step=step)
  return [one.verdict for one in found]


def test_all_columns_reach_the_function(file):
  file(
    "def score(response, example, step):\n"
    "  return example == {'id': 'a/1', 'source': 'sums', 'prompt': '2 + 6?',\n"
    "    'messages': [{'role': 'user', 'content': '2 + 6?'}],\n"
    "    'answer': '8', 'hard': [1, None], 'é': 'ü'} and step is None\n"
  )
  columns = {"hard": [1, None], "é": "ü"}
  found = judged(["mine.py:score"], ["8"], step=None, columns=columns)
  assert found == [Verdict("pass", 1.0, "", "8")]


def test_workers_never_see_jax_nor_the_terminal(file, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # of the trainer
  file(
    "import os, sys\n"
    "def score(response):\n"
    "  seen = {m.split('.')[0] for m in sys.modules}\n"
    "  assert not seen & {'jax', 'jaxlib', 'flax', 'numpy'}, seen\n"
    "  assert os.environ['JAX_PLATFORMS'] == 'cpu'\n"
    "  assert os.environ['MY_KEY'] == 'secret'\n"
    "  assert sys.stdin.read() == ''\n"
    "  return hash('a') == int(response)\n"
  )
  os.environ["MY_KEY"] = "secret"
  code = [sys.executable, "-c", "print(hash('a'))"]
  env = {**os.environ, "PYTHONHASHSEED": "0"}
  same = subprocess.check_output(code, env=env, text=True).strip()
  assert judged(["mine.py:score"], [same]) == [Verdict("pass", 1.0, "", same)]


BAD = """
import json, os, signal, subprocess, sys, time
json.dumps = json.loads = None
def score(response):
  print("I print", response)
  sys.stdout.buffer.write(b"\\0\\0\\0\\5hello")
  if response == "raise":
    raise RuntimeError("two\\nlines")
  if response == "nan":
    return float("nan")
  if response == "hang":
    time.sleep(600)
  if response == "exit":
    sys.exit(3)
  if response == "die":
    os._exit(3)
  if response == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
  if response == "kill":
    subprocess.Popen(["sleep", "4321"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
  if response == "fork":
    os.fork()
  if response == "fork and raise":
    if os.fork() == 0:
      raise RuntimeError("the child")
  return 1
"""


@pytest.mark.ci
def test_whatever_a_reward_does_the_others_are_judged(file, capfd):
  file(BAD)
  said = ["good", "raise", "nan", "hang", "exit", "die", "fork", "good again"]
  said += ["fork and raise", "stop", "kill", "last"]
  with own.Rewards(["mine.py:score"], workers=1, timeout_s=1.0) as some:
    (found,) = some.score([own.Group(said, example())], step=1)
    assert some.replaced().total() == 4 and not some.replaced()
  by = {s: one.verdict for s, one in zip(said, found, strict=True)}
  whys = {s: v.reason for s, v in by.items() if v.status == "invalid"}
  want = {
    "raise": "mine.py:score, line 8: RuntimeError: two lines",
    "nan": "mine.py:score, line 4 ... nan ... finite",
    "hang": "mine.py:score ... 1 s",
    "exit": "mine.py:score, line 14: SystemExit: 3 ... reward",
    "die": "mine.py:score ... reward ... process",
    "stop": "mine.py:score ... 1 s",
    "kill": "mine.py:score ... process",
  }
  assert whys.keys() == want.keys()
  assert all(mentions(whys[s], want[s]) for s in want)
  rest = {s: v for s, v in by.items() if s not in whys}
  assert {v.status for v in rest.values()} == {"pass"}
  assert all(v.answer == s for s, v in rest.items())  # each has its own answer
  assert subprocess.run(["pgrep", "-f", "sleep 4321"]).returncode == 1
  out, err = capfd.readouterr()
  assert out == "" and "I print good again" in err


def test_a_group_that_hangs_is_invalid_as_a_whole(file, monkeypatch):
  monkeypatch.setattr(own, "_IN_A_ROW", 2)  # calls, not responses
  file("import time\n" "def score(responses):\n"
    "  time.sleep(600 if responses[0] == 'hang' else 0)\n"
    "  return [1] * len(responses)\n")  # fmt: skip
  groups = [own.Group([first, "8"], example()) for first in ("8", "hang", "9")]
  with own.Rewards(["mine.py:score"], workers=1, timeout_s=0.5) as some:
    found = some.score(groups, step=1)
  said = [[one.verdict.status for one in row] for row in found]
  assert said == [["pass"] * 2, ["invalid"] * 2, ["pass"] * 2]


@pytest.mark.ci
def test_after_some_hangs_in_a_row_no_more_are_waited_for(file, monkeypatch):
  monkeypatch.setattr(own, "_IN_A_ROW", 3)
  file("import time\ndef score(response):\n  time.sleep(600)\n")
  found = judged(["mine.py:score"], [str(i) for i in range(50)], timeout_s=0.05)
  whys = [one.reason.rpartition(": ")[2] for one in found]
  assert whys[:3] == ["no answer in 0.05 s"] * 3
  assert set(whys[3:]) == {"no answer 3 times in a row; not called again"}


def test_hangs_now_and_then_do_not_end_a_run(file, monkeypatch):
  monkeypatch.setattr(own, "_IN_A_ROW", 2)
  file("import time\n" "def score(response):\n"
    "  time.sleep(600 * (int(response) % 2))\n" "  return 1\n")  # fmt: skip
  found = judged(["mine.py:score"], [*"0123456"], timeout_s=0.2)
  assert [v.status for v in found] == ["pass", "invalid"] * 3 + ["pass"]


def test_quick_responses_are_asked_together_and_one_that_hangs_is_late_alone(
  file, tmp_path
):
  file(
    "import os, time\n"
    f"log = open({str(tmp_path / 'log')!r}, 'a', buffering=1)\n"
    "def score(response, example):\n"
    "  print(response, file=log)\n"
    "  example['prompt'] += 'x'  # unseen by the next call\n"
    "  if response == 'hang': time.sleep(600)\n"
    "  if response == 'die': os._exit(1)\n"
    "  return len(response) / len(example['prompt'])\n"
  )
  said = ["a", "hang", "bb", "die", "a", "ccc"] + [str(i) for i in range(50)]
  asked = example()
  with own.Rewards(["mine.py:score"], workers=1, timeout_s=2.0) as some:
    some.score([own.Group([*"1234"], asked)] * 3, step=1)  # it is quick
    [found] = some.score([own.Group(said, asked)], step=1)
    assert sum(some.replaced().values()) == 2
  for text, one in zip(said, found, strict=True):
    bad, score = text in ("hang", "die"), len(text) / (1 + len(asked.question))
    assert (one.verdict.status == "invalid") == bad
    assert one.verdict.score == (0.0 if bad else score)
  tried = (tmp_path / "log").read_text().split()
  assert tried.count("hang") == 2 and tried.count("a") == 2  # together, alone


def test_each_function_has_its_own_pace(file, monkeypatch):
  file("import time\nquick = lambda response: 1\n"
    "slow = lambda response: time.sleep(0.03) or 1\n")  # fmt: skip
  asked, ask = [], own.FunctionWorker.ask
  asks = lambda self, it: asked.append(it[:2]) or ask(self, it)
  monkeypatch.setattr(own.FunctionWorker, "ask", asks)
  with own.Rewards(["mine.py:quick", "mine.py:slow"], workers=1) as some:
    for said in ("0123456", "789abcd"):
      some.score([own.Group([*said], example())], step=1)
  slow = [said for which, said in asked if which]
  assert slow == [[one] for one in "0123456789abcd"]
  assert len(asked) < 28  # the quick one is asked together


def alive(pid):
  try:
    return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False


LEAVES = """
import os, subprocess
def score(response):
  child = subprocess.Popen(["sleep", "600"], start_new_session=True)
  if os.fork() == 0:  # an orphan of an orphan
    if os.fork() == 0:
      os.setsid()
      os.execvp("sleep", ["sleep", "601"])
    os._exit(0)
  return child.pid
"""


def sleeps(seconds):
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      if path.read_bytes() == f"sleep\0{seconds}\0".encode():
        found.append(path.parent.name)
    except OSError:
      pass
  return {pid for pid in found if alive(pid)}


def wait_for(true):
  for _ in range(400):
    if true():
      return True
    time.sleep(0.05)
  return False


def test_what_a_reward_started_ends_with_its_worker(file):
  file(LEAVES)
  before = sleeps(601)
  with own.Rewards(["mine.py:score"], workers=1) as some:
    ((one,),) = some.score([own.Group(["8"], example())], step=1)
    child = int(one.verdict.score)
    assert alive(child) and wait_for(lambda: sleeps(601) - before)
  assert not alive(child) and not sleeps(601) - before


def test_nothing_is_left_of_a_run_that_is_killed(file, tmp_path):
  file(LEAVES.replace("601", "602"))
  code = (
    "import time\n"
    "from brorl_jax.verdicts import own\n"
    "from brorl_jax.verdicts.base import Example\n"
    "rewards = own.Rewards(['mine.py:score'], workers=1)\n"
    "asked = ({'role': 'user', 'content': '?'},)\n"
    "e = Example('a', 'own', 's', asked, {})\n"
    "((one,),) = rewards.score([own.Group(['8'], e)], step=1)\n"
    "print(int(one.verdict.score), flush=True)\n"
    "time.sleep(600)\n"
  )
  root = str(pathlib.Path(own.__file__).parents[3])
  run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": root}, text=True)  # fmt: skip
  assert run.stdout
  child = int(run.stdout.readline())
  run.send_signal(signal.SIGKILL)
  run.wait()
  run.stdout.close()
  assert wait_for(lambda: not alive(child) and not sleeps(602))


def test_equal_responses_are_asked_once_and_a_group_sees_all(file):
  file(
    "calls = 0\n"
    "def one(response):\n"
    "  global calls\n"
    "  calls += 1\n"
    "  return calls\n"
    "def all_of_them(responses):\n"
    "  return [responses.index(r) + 10 * len(responses) for r in responses]\n"
  )
  said = ["8", "9", "8", "8", "9", "7"]
  found = judged(["mine.py:one"], said)
  assert [one.score for one in found] == [1, 2, 1, 1, 2, 3]
  found = judged(["mine.py:all_of_them"], said)
  assert [one.score for one in found] == [60, 61, 60, 60, 61, 65]


def test_many_groups_and_workers_keep_their_order(file):
  file("import os\n" "def score(response, example):\n"
    "  return int(response) * 1000 + example['number']\n"
    "def group(responses, example, step):\n"
    "  return [step] * len(responses)\n")  # fmt: skip
  groups = [own.Group([str(r) for r in range(p, p + 50)], example(number=p))
    for p in range(20)]  # fmt: skip
  with own.Rewards(["mine.py:score", "mine.py:group"], workers=3) as some:
    found = some.score(groups, step=7)
    ask = lambda: again.append(some.score(groups[:4], step=8))
    again: list = []
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  for p, row in enumerate(found):
    want = [1000 * r + p + 7 for r in range(p, p + 50)]
    assert [one.verdict.score for one in row] == want
    assert all(one.seconds >= 0.0 for one in row)
  assert len(again) == 3 and again[0][3][0].verdict.score == 3003 + 8


def test_several_are_added(file):
  file("from brorl_jax.verdicts.base import Verdict\n"
    "def right(response, example):\n"
    "  good = response.split()[-1] == example['answer']\n"
    "  return Verdict('pass' if good else 'fail', good, '', 'the answer')\n"
    "def brief(response):\n"
    "  return 2 / len(response) if response else float('nan')\n")  # fmt: skip
  names = ["mine.py:right", "mine.py:brief"]
  found = judged(names, ["is 8", "8 9"])
  verdict = lambda *said: Verdict(*said, "", "the answer")
  assert found == [verdict("pass", 1.5), verdict("fail", 2 / 3)]
  # The first says whether it is a pass, however much there is for the other.
  found = judged(names[::-1], ["is 8", "8 9"])
  assert [one.status for one in found] == ["fail"] * 2
  assert [one.score for one in found] == [1.5, 2 / 3]
  (found,) = judged(names, [""])
  assert found.status == "invalid" and "mine.py:right, line 3" in found.reason


@pytest.mark.parametrize("text, why", [
  ("import os; os._exit(1)", r"\['mine.py:f'\].* process"),
  ("def g(): ...", "config.reward.verifier = 'mine.py:f': .* no function"),
  ("while True: pass", r"\['mine.py:f'\].* 0\.5 s"),
  ("raise KeyboardInterrupt", "config.reward.verifier: KeyboardInterrupt"),
])  # fmt: skip
def test_a_file_that_does_not_end_is_refused(file, monkeypatch, text, why):
  monkeypatch.setattr(own, "_LOAD_S", 0.5 if "while" in text else 20.0)
  file(text)
  with pytest.raises(ValueError, match=why):
    own.Rewards(["mine.py:f"], workers=1)


def test_a_file_that_changes_while_the_run_goes_on_is_not_taken(file):
  text = "import os\ndef f(response):\n  if response == 'x': os._exit(1)\n"
  file(text + "  return 1\n")
  with own.Rewards(["mine.py:f"], workers=1) as some:
    assert some.digests.keys() == {"mine.py:f"}
    (before,) = some.score([own.Group(["8", "x"], example())], step=1)
    file(text + "  return 2\n")
    (after,) = some.score([own.Group(["8"], example())], step=1)
  assert [one.verdict.status for one in before] == ["pass", "invalid"]
  why = after[0].verdict.reason
  assert mentions(why, "of mine.py:f ... reward ... changed")


@pytest.mark.ci
def test_closing_ends_what_is_being_judged(file):
  file("import time\ndef f(response):\n  time.sleep(600)\n")
  some = own.Rewards(["mine.py:f"], workers=2, timeout_s=500.0)
  timer = threading.Timer(0.5, some.close)
  timer.start()
  (found,) = some.score([own.Group(["8", "9"], example())], step=1)
  timer.join()
  assert [one.verdict.status for one in found] == ["invalid"] * 2


# Data.


def test_lines_of_any_columns_are_examples(tmp_path):
  path = tmp_path / "odd data.jsonl"
  lines = [
    {"prompt": "a?", "answer": 3.5, "tests": None, "choices": {}, "sorce": 1},
    {"id": 17, "prompt": "b?", "domain": ["x"], "source": "https://a b"},
    {"id": "c", "source": "mine", "prompt": "c?", "time_limit": "soon"},
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  form = Form(sole=own.DOMAIN)
  found = dataset.read(str(path), form=form, domains={}).examples
  assert {one.domain for one in found} == {"own"}
  assert [one.task for one in found] == ["odd-data", "odd-data", "mine"]
  assert found[2].id == "c" and len({one.id for one in found}) == 3
  for one, line in zip(found, lines, strict=True):
    assert one.entry == {} and one.question == line["prompt"]
    assert one.columns == {k: v for k, v in line.items() if k != "prompt"}


# Functions that wait for others, and functions of this process.


def given(*functions, responses, timeout_s=60.0, workers=1):
  named = {f"python:{f.__name__}": f for f in functions}
  how = {"timeout_s": timeout_s, "workers": workers, "given": named}
  with own.Rewards([*named], **how) as rewards:
    [row] = rewards.score([own.Group(responses, example())], step=3)
  return [scored.verdict for scored in row]


def waits(concurrency):
  """A reward that says how many of its calls waited at most at a time."""
  now, most = [0], [0]

  async def score(response, example):
    now[0] += 1
    most[0] = max(most[0], now[0])
    await asyncio.sleep(0.01)
    now[0] -= 1
    return len(response) / 10

  score.concurrency = concurrency
  return score, most


@pytest.mark.parametrize("concurrency", [1, 3])
def test_calls_wait_together_up_to_a_bound(concurrency):
  score, most = waits(concurrency)
  found = given(score, responses=["a" * n for n in range(8)])
  assert [v.score for v in found] == [n / 10 for n in range(8)]
  assert most == [concurrency]


def test_workers_share_the_bound():
  score, _ = waits(6)
  loaded = own.load("python:score", {"python:score": score})
  assert [loaded.share(workers) for workers in (1, 4, 9)] == [6, 1, 1]
  # 6 waiting, each three times .5 s and a pause: eight calls take two turns.
  turn = 3 * (0.5 + own._PAUSE_S)
  assert loaded.seconds(8, 0.5, 1) == 2 * turn + own._SPARE_S


def test_an_async_call_is_tried_again_and_a_late_one_is_alone(monkeypatch):
  monkeypatch.setattr(own, "_PAUSE_S", 0.0)
  tried = []

  async def score(response):
    tried.append(response)
    if response == "late":
      await asyncio.sleep(9.0)
    if tried.count(response) < 3:
      raise ConnectionError("no route")
    return 1.0

  flaky, late = given(score, responses=["flaky", "late"], timeout_s=0.05)
  assert flaky.status == "pass" and tried.count("flaky") == 3
  assert late.status == "invalid" and mentions(late.reason, "score: late")
  score.retries = 0
  tried.clear()
  [once] = given(score, responses=["flaky"])
  assert mentions(once.reason, "score, line ... ConnectionError: no route")


def test_an_async_call_that_returns_too_few_is_not_tried_again():
  tried = []

  async def score(responses):
    tried.append(responses)
    return [1.0]

  found = given(score, responses=["a", "b"])
  assert [v.status for v in found] == ["invalid"] * 2 and len(tried) == 1


def test_an_async_function_of_a_file(file):
  text = "async def score(responses):\n  return [len(r) for r in responses]\n"
  found = judged([f"{file(text)}:score"], ["a", "abc"])
  assert [verdict.score for verdict in found] == [1.0, 3.0]


def test_a_wrong_bound_is_refused():
  score, _ = waits(0)
  with refuses(ValueError, "concurrency = 0; use 1 or more"):
    own.load("python:score", {"python:score": score})


def test_none_takes_no_part():
  def some(response):
    return None if response == "a" else 2.0

  def all_(response):
    return 0.25

  only, both = given(some, responses=["a", "b"])
  assert (only.status, only.reason) == ("invalid", own.SKIPPED)
  assert both.score == 2.0
  assert [v.score for v in given(some, all_, responses=["a", "b"])] == [0.25,
    2.25]  # fmt: skip


def test_functions_of_this_process_run_in_it_and_may_be_late():
  def score(response):
    if response == "late":
      time.sleep(9.0)
    return float(os.getpid())

  found = given(score, responses=["a", "late", "b"], timeout_s=0.2)
  assert [v.score for v in found[::2]] == [os.getpid()] * 2
  assert found[1].status == "invalid"
  with refuses(ValueError, "'python:score' was reward= of brorl_jax.train"):
    own.load("python:score")


def test_what_a_function_says_is_known_by_its_text():
  def first(response):
    return 1.0

  named = lambda f: own.load("python:f", {"python:f": f}).digest
  assert named(first) == named(first) != named(lambda response: 1.0) != ""
  assert named(functools.partial(first)) == ""


def test_a_reward_of_trl_needs_an_adapter():
  """As verdicts/README.md has it."""

  def of_trl(prompts, completions, answer, **_):
    return [float(a in c) for a, c in zip(answer, completions, strict=True)]

  def score(responses, example):
    columns = {k: [v] * len(responses) for k, v in example.items()}
    return of_trl(columns.pop("prompt"), responses, **columns)

  found = given(score, responses=["it is 8", "9"])
  assert [v.score for v in found] == [1.0, 0.0]
