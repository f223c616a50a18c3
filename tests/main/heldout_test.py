"""Held-out prompts: key and sizes; what a policy was trained on is refused."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
from messages import mentions
from one_step import config as small
from one_step import resolved
from runs_for_tests import problems

from brorl_jax import config as sections
from brorl_jax.data import dataset
from brorl_jax.data import heldout as data_heldout
from brorl_jax.main import evaluate, export, recorder
from brorl_jax.model import huggingface
from brorl_jax.plan import checkpoint_source
from brorl_jax.runs import folder, metrics
from brorl_jax.stages import sampling
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.domains import DOMAINS
from tests.main.evaluate_test import (  # noqa: F401
  config,
  make_run,
  one_device,
  refused,
  run,
)


class Sampled(Exception):
  """Ends an evaluation where it samples."""


@pytest.fixture
def sampled(monkeypatch):
  """What the first chunk of an evaluation is sampled with."""

  def sample(this, c, how, params, prompts, key):
    raise Sampled(c, how, params, prompts, key)

  monkeypatch.setattr(sampling, "sample_heldout", sample)

  def of(chunks):
    with pytest.raises(Sampled) as e:
      next(chunks)
    return e.value.args

  return of


@pytest.mark.parametrize("first", [0, 3])
def test_a_prompt_draws_by_its_number_with_the_key_of_step_0(
  wired, sampled, first
):
  this, examples, scorer, *_ = wired
  c, how = this.config, this.phases[0].memory.heldout
  how = dataclasses.replace(how, prompts=5)
  prompts, params = examples.heldout(), {"w": np.arange(3.0)}
  told, fits, own, drawn, key = sampled(
    recorder.records(
      this, c, how, examples, scorer, params, prompts, first=first
    )
  )
  assert (told, fits) == (c, how)
  np.testing.assert_array_equal(own["w"], params["w"])
  index = np.arange(first, first + 5)
  np.testing.assert_array_equal(drawn.index, index)
  want = examples.pad(prompts[first : first + 5], index.astype(np.int32))
  np.testing.assert_array_equal(drawn.tokens, want.tokens)
  assert key == jax.random.fold_in(jax.random.key(c.run.seed), 0)


def test_a_step_is_evaluated_as_its_phase_samples(wired, sampled):
  this = resolved(
    small(
      phases=(
        {"from_step": 3, "sampling.max_new_tokens": 9},
        {"from_step": 5, "sampling.max_new_tokens": 5},
      )
    )
  )
  _, examples, scorer, *_ = wired
  sizes = {}
  for step in range(7):
    chunks = recorder.records_of_step(
      this, examples, scorer, step, {}, examples.heldout()
    )
    c, how, *_ = sampled(chunks)
    sizes[step] = c.sampling.max_new_tokens
    assert how in [p.memory.heldout for p in this.phases if p.config == c]
  assert [*sizes.values()] == [6, 6, 6, 9, 9, 5, 5]


def run_on(workdir, *files, held_out=(), one_in=10, earlier=(), gym_weight=0.0):
  """config.json of a run that was trained on files."""
  workdir.mkdir()
  for some in (*earlier, files):
    c = config(
      **{
        "data.domains.gym.weight": gym_weight,
        "data.files": tuple(some),
        "data.heldout_files": tuple(held_out),
        "data.heldout_one_in": one_in,
      }
    )
    there = [path for path in some if os.path.exists(path)]
    files = dict.fromkeys(some, "not there any more")
    files |= dataset.file_digests(there) if there else {}
    folder.write_config(sections.as_dict(c), workdir, files=files)
  return workdir


def refuse(run, evaluated):
  return evaluate.refuse_trained_on(
    checkpoint_source.starts(
      checkpoint_source.CheckpointSource(huggingface.ASSETS, run)
    ),
    evaluated,
  )


def held(path, which=slice(None)):
  data = dataset.read(path, domains=DOMAINS)
  return dataset.Data(data.examples[which], data.places[which])


def test_a_prompt_that_a_run_trained_on_is_refused_by_id_and_by_text(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(40))
  trained_on = run_on(tmp_path / "run", a, held_out=["b.jsonl"])
  for i in range(40):  # with held-out files, all of these are trained on
    with pytest.raises(ValueError, match=f"'q-{i}' is also the"):
      refuse(trained_on, held(a, slice(i, i + 1)))
  fine = problems(tmp_path / "c.jsonl", range(100, 110), prefix="c")
  assert refuse(trained_on, held(fine)) == []
  same_id = problems(tmp_path / "d.jsonl", range(7, 8), prefix="q")
  (tmp_path / "d.jsonl").write_text(
    (tmp_path / "d.jsonl").read_text().replace("What is 7", "How much is 7")
  )
  with pytest.raises(ValueError) as error:
    refuse(trained_on, held(same_id))
  assert mentions(
    str(error.value),
    f"of {trained_on} ... {same_id}, line 1 ... 'q-7' ... {a}, line 8",
  )
  same_text = problems(tmp_path / "e.jsonl", (200, 9), prefix="e")
  with pytest.raises(ValueError) as error:
    refuse(trained_on, held(same_text))
  assert mentions(
    str(error.value),
    f"of {trained_on} ... {same_text}, line 2 ... {a}, line 10",
  )


def test_its_own_held_out_part_may_be_evaluated_and_no_other(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(60))
  trained_on = run_on(tmp_path / "run", a, one_in=3)
  data = dataset.read(a, domains=DOMAINS)
  _, mine = data_heldout.split(data, one_in=3)
  assert refuse(trained_on, mine) == []
  _, other = data_heldout.split(data, one_in=4)
  with pytest.raises(ValueError, match=r"had this prompt: .*'q-\d+'"):
    refuse(trained_on, other)


def test_files_of_earlier_starts_count_too(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10), prefix="a")
  b = problems(tmp_path / "b.jsonl", range(50, 60), prefix="b")
  trained_on = run_on(tmp_path / "run", b, held_out=["x.jsonl"], earlier=[[a]])
  with pytest.raises(ValueError, match=r"'a-0' is also the training example"):
    refuse(trained_on, held(a))


def test_files_that_are_gone_are_named_and_do_not_stop_it(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10), prefix="a")
  gone = str(tmp_path / "gone.jsonl")
  trained_on = run_on(tmp_path / "run", gone, a, held_out=["x.jsonl"])
  c = held(problems(tmp_path / "c.jsonl", range(90, 95), prefix="c"))
  (line,) = refuse(trained_on, c)
  assert mentions(line, f"{trained_on} ... {gone}")
  with pytest.raises(ValueError, match=r"'a-0' is also the training example"):
    refuse(trained_on, held(a))


def test_stored_puzzles_that_a_run_may_have_drawn_are_refused(tmp_path):
  family = gym.Family("gcd", {"min_value": 1, "max_value": 40})
  drawn = gym.puzzle(family, "train", 7, seed=11)
  generated = dataset.Data([drawn], ["there"])
  trained_on = run_on(tmp_path / "a", gym_weight=1.0)
  with pytest.raises(ValueError) as error:
    refuse(trained_on, generated)
  assert mentions(
    str(error.value), f"training of {trained_on} ... gcd ... held-out"
  )
  # Of another seed, by the same generator: the split holds for all of them.
  other = gym.heldout([family], per_family=30, seed=11)
  assert refuse(trained_on, dataset.Data(other, ["h"] * 30)) == []
  # A run without puzzles, or with stored ones alone, has drawn none.
  assert refuse(run_on(tmp_path / "b"), generated) == []
  stored = [
    {"id": f"s-{i}", "domain": "gym", "entry": p.entry, "prompt": p.question}
    for i, p in enumerate(other)
  ]
  path = tmp_path / "stored.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in stored))
  trained_on = run_on(
    tmp_path / "c", str(path), held_out=["x.jsonl"], gym_weight=1.0
  )
  assert refuse(trained_on, generated) == []
  with pytest.raises(
    ValueError, match="h: held-out prompt is also the training prompt"
  ):
    refuse(trained_on, dataset.Data(other, ["h"] * 30))


def test_the_command_refuses_what_a_run_was_trained_on(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", range(60))
  changes = {"data.files": (a,), "data.domains.gym.weight": 0.0}
  changes |= {"data.heldout_one_in": 3, "prompt_tokens": 80}
  training = make_run(tmp_path / "training", [3], **changes)
  changes["checkpoint"] = str(training)
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert mentions(line, f"of {training} ... {a}")
  assert not (tmp_path / "e").exists()
  run(tmp_path / "e", **changes)
  (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
  changes["data.files"] = (str(tmp_path / "b.jsonl"),)
  capsys.readouterr()
  run(tmp_path / "f", **changes | {"data.heldout_one_in": 4})
  said = f"of {training}: {a}"
  assert mentions(capsys.readouterr().out, said)


@pytest.mark.ci
def test_lines_of_another_form_are_compared_as_they_were_read(tmp_path):
  path = tmp_path / "a.jsonl"
  rows = [{"question": f"{i} + 1 = ?", "label": i + 1} for i in range(30)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  changes = {"data.files": (str(path),), "prompt_tokens": 60}
  changes |= {"data.fields": "prompt:question,answer:label"}
  changes |= {"data.domain": "math", "data.heldout_one_in": 3}
  training = make_run(tmp_path / "training", [3], **changes)
  changes["checkpoint"] = str(training)
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert mentions(line, f"of {training} ... prompt")
  [start] = checkpoint_source.starts(checkpoint_source.locate(str(training)))
  assert (start.fields, start.domain) == (
    "prompt:question,answer:label",
    "math",
  )
  assert start.made == []  # files alone
  # Another file of that name shares its ids, and none of its prompts.
  other = tmp_path / "x" / "a.jsonl"
  other.parent.mkdir()
  other.write_text('{"question": "7 * 6 = ?", "label": 42}\n')
  held_out = {**changes, "data.files": (), "data.heldout_files": (str(other),)}
  run(tmp_path / "e", **held_out)


def test_a_file_that_was_edited_after_training_is_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10))
  trained_on = run_on(tmp_path / "run", a, held_out=["x.jsonl"])
  c = held(problems(tmp_path / "c.jsonl", range(2, 3), prefix="c"))
  with pytest.raises(ValueError, match="held-out prompt is also"):
    refuse(trained_on, c)
  for damage in (
    lambda: problems(tmp_path / "a.jsonl", range(5, 10)),
    lambda: (tmp_path / "a.jsonl").write_text(""),
  ):
    damage()
    with pytest.raises(ValueError) as error:
      refuse(trained_on, c)
    assert mentions(str(error.value), f"{a} ... {trained_on}")


def test_files_that_came_later_were_not_trained_on(tmp_path):
  problems(tmp_path / "a.jsonl", range(10), prefix="a")
  c = config(**{"data.files": (str(tmp_path / "*.jsonl"),)})
  (tmp_path / "run").mkdir()
  files = dataset.file_digests(c.data.files)
  folder.write_config(sections.as_dict(c), tmp_path / "run", files=files)
  b = held(problems(tmp_path / "b.jsonl", range(20, 30), prefix="b"))
  assert refuse(tmp_path / "run", b) == []


@pytest.mark.ci
def test_what_an_exported_policy_was_trained_on_is_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(60))
  changes = {"data.files": (a,), "data.domains.gym.weight": 0.0}
  changes |= {"data.heldout_one_in": 3, "prompt_tokens": 80}
  training = make_run(tmp_path / "training", [3], **changes)
  export.run(config(checkpoint=str(training)).policy, tmp_path / "policy")
  changes["checkpoint"] = str(tmp_path / "policy")
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert mentions(line, f"of {training} ... {a}")
  # What was trained further knows what it began with, exported again or not.
  b = problems(tmp_path / "b.jsonl", range(100, 160), prefix="b")
  changes["data.files"] = (b,)
  further = make_run(tmp_path / "further", [3], **changes)
  export.run(config(checkpoint=str(further)).policy, tmp_path / "again")
  both = [str(further), str(training)]
  for run_or_policy in (further, tmp_path / "again"):
    starts = checkpoint_source.starts(
      checkpoint_source.locate(str(run_or_policy))
    )
    assert [start.run for start in starts] == both
  (tmp_path / "policy" / "trained_on.json").write_text('{"starts": [7]}')
  line = refused(tmp_path / "e", **changes | {"checkpoint": str(further)})
  assert mentions(
    line, f"{tmp_path / 'policy' / 'trained_on.json'} ... --mode=export"
  )


@pytest.mark.ci
def test_an_evaluation_needs_no_files_to_train_on(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", range(4))
  changes = {"data.heldout_files": (a,), "data.domains.gym.weight": 0.0}
  changes |= {"prompt_tokens": 80}
  run(tmp_path / "e", **changes)
  assert "files: none to train on; held out 4;" in capsys.readouterr().out
  records = metrics.read_lines(tmp_path / "e" / "eval" / "records.jsonl")
  assert {r["id"] for r in records} == {f"q-{i}" for i in range(4)}
  # Against what the policy was trained on.
  b = problems(tmp_path / "b.jsonl", range(3, 9), prefix="b")
  trained_on = {"data.files": (b,), "data.domains.gym.weight": 0.0}
  trained_on["data.heldout_files"] = ("x.jsonl",)
  training = make_run(tmp_path / "training", [3], **trained_on)
  line = refused(tmp_path / "f", **changes, checkpoint=str(training))
  assert mentions(line, f"{b}, line 1")
  # Other held-out prompts are another evaluation.
  problems(tmp_path / "a.jsonl", range(5))
  assert refused(tmp_path / "e", **changes).startswith("the run's data has ch")
