"""Any content of the lines of a folder: every mode ends well or in a line.

Resuming, a report, an evaluation and an export read these files in this
process, with all checks that a command makes. What costs seconds and reads
nothing of the folder is replaced: programs, and the policy's weights
beside the checkpoint.
"""

import contextlib
import functools
import io
import json
import pathlib
import shutil
import tempfile
from unittest import mock

import configured
import fuzzing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs_for_tests as made
from hypothesis import strategies as st

from brorl_jax import config as sections
from brorl_jax import evaluate as evaluations
from brorl_jax.configs import base
from brorl_jax.errors import UserError
from brorl_jax.main import report, settings, train
from brorl_jax.many import meshes
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.plan import resolve
from brorl_jax.runs import checkpoints, folder
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.types import RunState, State

pytestmark = pytest.mark.ci

_OWN = {"loss.kind": {"name": "mine.py:loss", "digest": "0" * 32}}
_IDS = ("gcd/heldout/0", "gcd/heldout/1")
_FILES = ("metrics.jsonl", "samples.jsonl", "events.jsonl", "eval/curve.jsonl",
  "eval/records.jsonl", "checkpoints/2/extra/metadata")  # fmt: skip


@functools.cache
def config():
  c = base.get_config()
  with c.unlocked():
    for name in [name for name in c.data.families if name != "gcd"]:
      del c.data.families[name]
  small = dict(n=4, samples=8, in_flight=8, steps=2, mesh_fsdp=1, minibatches=1)
  small |= dict(eval_every=2, eval_prompts=2, eval_n=2, dtype="float32")
  return settings.typed(configured.changed(c, **small))


@functools.cache
def examples():
  return Examples(config(), tokenizer.Tokenizer(huggingface.ASSETS))


class Judge(Scorer):
  def __init__(self, *_):
    self.sandbox, self.log_lines, self.functions = {}, [], {}
    self.episodes = False

  def close(self):
    pass

  def worker_metrics(self):
    return {}


@functools.cache
def mesh():
  return meshes.over([jax.devices()[:1]], meshes.ONE)


def records(step):
  prompts = dict.fromkeys(_IDS, ("gym", "gcd"))
  return made.records(step, ([1, 0], [0, 0]), prompts)


def lines(steps):
  more = {
    "rollout/tokens_per_s": 9.0, "reward/mean": 0.5, "policy/entropy": 1.0
  }  # fmt: skip
  more |= {"sampling/degenerate_fraction": 0.5, "time/busy_s": 1.5}
  return [line | more for line in made.metric_lines(steps)]


def evaluation(step):
  return {"step": step, "pass_at_1": 0.25,
    "half_width": 0.5, "by_family": {"gcd": 0.25}, "rates": [0.5, 0.0],
    "summary": evaluations.summary(records(step))}  # fmt: skip


def sample(step):
  verdict = {"answer": "4", "verdict": "pass", "reason": "", "score": 1.0}
  return {"step": step, "id": "gcd/train/1", "domain": "gym",
    "task": "gcd", "prompt": "Which?", "response": "4", "gold": "4", **verdict,
    "reward": 1.0, "seconds": 0.1, "tokens": 3, "truncated": False}  # fmt: skip


def params():
  return huggingface.load(huggingface.ASSETS)[1]


@functools.cache
def place():
  return tempfile.TemporaryDirectory()


@functools.cache
def run() -> pathlib.Path:
  path = pathlib.Path(place().name) / "run"
  path.mkdir()
  entries = {"data": examples().fingerprint,
    "functions": _OWN, "files": {}, "forms": {}, "dropped": [],
    "sandbox": {}, "chat_template": None, "began_with": str(huggingface.ASSETS),
    "run": "0123456789abcdef"}  # fmt: skip
  values = sections.as_dict(config())
  folder.write_config(values, path, **entries)
  changed = json.loads(json.dumps(values))
  changed["run"]["save_every"] = 1
  folder.write_config(changed, path, **entries)  # an earlier start
  folder.write_config(values, path, **entries)
  made.dump(path / "metrics.jsonl", lines(2))
  made.dump(path / "samples.jsonl", [sample(1), sample(2)])
  event = {"step": 1, "time": "2026-11-25T08:58:00.000Z", "event": "resume"}
  made.dump(path / "events.jsonl", [event] * 2)
  made.dump(path / "eval/curve.jsonl", [evaluation(0), evaluation(2)])
  made.dump(path / "eval/records.jsonl", [*records(0), *records(2)])
  store = checkpoints.Store(path / "checkpoints", keep=9, run=entries["run"])
  progress = RunState(tokens=9, best=0.5, beyond={"entropy_low": 2}).to_json()
  store.save(2, State(np.int32(2), params(), {}, None), progress)
  store.close()
  return path


class Trains(Exception):
  """The run goes on to train."""


class Stages:
  """Those of a step that nobody makes."""

  def __getattr__(self, name):
    raise Trains


def parts(this, workdir, *_):
  """What a start checks of the folder, and parts that cannot train."""
  resolve.refuse_changes(folder.stored(workdir, "functions"), _OWN)
  examples().refuse_changes(folder.stored(workdir, "data"))
  state = State(jnp.int32(0), like(), {}, None)
  entries = {"data": examples().fingerprint, "functions": _OWN}
  return train._Parts(examples(), Judge(), [], state, entries)


@functools.cache
def like():
  return jax.tree.map(jnp.zeros_like, params())


def replaced():
  """What costs seconds and reads nothing of the folder."""
  stack = contextlib.ExitStack()
  patch = lambda *args: stack.enter_context(mock.patch.object(*args))
  patch(meshes, "make_mesh", lambda **_: mesh())
  patch(train, "_parts", parts)
  patch(train, "stages", lambda *_: Stages())
  patch(train, "records_of_step", lambda *_: iter([]))
  return stack


def resume(path, out):
  c = config()
  this = resolve.resolve(c, resolve.here(c.devices), path)
  train.run(this, path, allow_change=False)


def page(path, out):
  report.run([path])


MODES = {f.__name__: f for f in (resume, page)}


def ends(mode, path, out):
  """Runs a mode; the line in which it ended, None if it ended well."""
  said = io.StringIO()
  try:
    with (replaced(), contextlib.redirect_stdout(said),
      contextlib.redirect_stderr(said)):  # fmt: skip
      MODES[mode](path, out)
  except (UserError, OSError) as e:
    return fuzzing.one_line(e, longest=5000)
  except Trains:
    pass


@contextlib.contextmanager
def copied():
  with tempfile.TemporaryDirectory() as to:
    path = pathlib.Path(to) / "run"
    shutil.copytree(run(), path)
    yield path, pathlib.Path(to)


def test_every_mode_reads_a_whole_folder():
  for mode in MODES:
    with copied() as (path, out):
      assert ends(mode, path, out) is None, mode


_BYTES = st.sampled_from(
  [b"", b"\x00", b"\xff", b"NaN", b"[", b"{" * 9, b'{"a":' * 3000, b"\n", b"x"]
)


def changed(draw, path):
  """Damages one of the files, as bytes or as the values that they are."""
  if draw(st.booleans()):
    data = path.read_bytes()
    at = draw(st.integers(0, 10**6)) % (len(data) + 1)
    taken = draw(st.sampled_from([0, 0, 1, 10**9]))
    path.write_bytes(data[:at] + draw(_BYTES) + data[at + taken :])
    return
  values = read(path)
  for _ in range(draw(st.integers(1, 2))):
    fuzzing.mutate(draw, values)
  write(path, values)


def read(path):
  lined, text = path.suffix == ".jsonl", path.read_text()
  return [json.loads(x) for x in (text.splitlines() if lined else [text])]


def write(path, values):
  path.write_text("".join(json.dumps(x) + "\n" for x in values))


def check_folder(mode, name, data):
  with copied() as (path, out):
    changed(data.draw, path / name)
    ends(mode, path, out)


test_folder, test_folder_at_length = fuzzing.tiers(
  st.sampled_from(sorted(MODES)), st.sampled_from(_FILES), st.data(), few=12,
  many=3_000,
)(check_folder)  # fmt: skip


def at(values, place):
  for key in place:
    values = values[key]
  return values


# What ended in a traceback once: a file, the mode that read it, where in its
# values, and what came there.
_KNOWN = [
  ("metrics.jsonl", "resume", (0, "policy/entropy"), 10**400),
  ("metrics.jsonl", "page", (1, "time/rollout_s"), -1800.0),
  ("eval/records.jsonl", "page", (0, "score"), 10**400),
  ("samples.jsonl", "page", (0, "reward"), float("nan")),
  ("config.json", "resume", (0, "config", "optim", "a\nb"), 1),
]


@pytest.mark.parametrize("case", _KNOWN, ids=str)
def test_what_ended_in_a_traceback_once(case):
  name, mode, (*place, last), value = case
  with copied() as (path, out):
    values = read(path / name)
    at(values, place)[last] = value
    write(path / name, values)
    ended = ends(mode, path, out)
  # A speed that cannot be computed is left out.
  assert ended is not None or value == -1800.0


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_config_that_no_run_wrote_is_refused(mode):
  with copied() as (path, out):
    for text in ("{", '{"config": 3}'):
      (path / "config.json").write_text(text)
      assert "config.json" in ends(mode, path, out)
