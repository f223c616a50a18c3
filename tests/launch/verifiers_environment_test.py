"""Environments of the package verifiers: replies and rewards are its own."""

import json
import os
import sys

import pytest
from launchers import LAUNCH, ran

from brorl_jax.data import dataset
from brorl_jax.verdicts import own

pytest.importorskip("verifiers")
FILE = """
import datasets, time
import verifiers as vf

class Countdown(vf.MultiTurnEnv):
  async def setup_state(self, state):
    state["left"] = int(state["answer"])

  async def env_response(self, messages, state, **_):
    state["left"] -= 1
    said = messages[-1].content
    state["final_env_response"] = [] if said == "stop" else None
    if said == "error":
      raise vf.Error("no answer")
    text = f"{said}! {time.time() if said == 'now' else state['left']} more."
    return [vf.UserMessage(content=text)] * (2 if said == "two" else 1)

  @vf.stop
  async def is_zero(self, state):
    return state["left"] == 0

def load_environment(turns=None):
  right = lambda completion, state: completion[-1].content == state["answer"]
  right.__name__ = "right"
  rows = datasets.Dataset.from_list([{"question": "Hi", "answer": "2"}])
  how = {"dataset": rows, "rubric": vf.Rubric(funcs=[right])}
  if turns is None:
    return vf.SingleTurnEnv(system_prompt="Count.", **how)
  return Countdown(turns, **how) if turns else vf.ToolEnv([print], **how)
"""
NO = "invalid", 0.0
SINGLE = {"2": ("pass", 1.0, "2"), "3": ("fail", 0.0, "3")}
TURNS = {
  "5": ("fail", 0.0, "5! 1 more."), "5|5! 1 more.|2": ("pass", 1.0, "2"),
  "5|5! 1 more.|3": ("fail", 0.0, "3"), "stop": ("fail", 0.0, "stop"),
  "two": (*NO, "more than a user's text"), "error": (*NO, "no answer"),
  "5|6! 1 more.|2": (*NO, "not say before"),
  "now|now! 1 more.|2": (*NO, "not say before"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, want", [
  ([], SINGLE), (['{"turns": 2}', "eval"], TURNS),
  (['{"turns": 0}'], {"2": (*NO, "has tools")}),
])  # fmt: skip
def test_an_environment_trains(tmp_path, monkeypatch, arguments, want):
  (tmp_path / "counting.py").write_text(FILE)
  monkeypatch.syspath_prepend(tmp_path)  # which workers have too
  monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{LAUNCH.parent}")
  words = ["-m", "launch.verifiers_environment", "counting", *arguments]
  done = ran(sys.executable, *words, env=os.environ | {"TQDM_DISABLE": "1"})
  assert done.returncode == 0, done.stderr
  (tmp_path / "train.jsonl").write_text(done.stdout)
  how = {"form": dataset.Form(domain="own"), "domains": {"own": own.DOMAIN}}
  (example,) = dataset.read(str(tmp_path / "train.jsonl"), **how).examples
  turns = [json.dumps(episode.split("|")) for episode in want]
  with own.Rewards([f"{LAUNCH}/verifiers_environment.py:step"]) as some:
    (found,) = some.score([own.Group(turns, example)], step=1)
  for (one, _), (*head, text) in zip(found, want.values(), strict=True):
    assert [one.status, one.score] == head
    assert text in (one.reason if head == [*NO] else one.answer)
