"""Tests of brorl_jax/plan/report.py: what is printed and refused."""

import json

import pytest
import runs_ahead as made
from messages import mentions

from brorl_jax.plan import measured, report
from brorl_jax.plan.chips import CHIPS
from brorl_jax.plan.hlo import Collective
from brorl_jax.plan.plan import TooLarge

LARGE = Collective("all-gather", 2**20, 8)


@pytest.fixture
def show(monkeypatch, capsys):
  """What is printed of programs that were measured."""

  def printed(*some, chip=None, run=None):
    monkeypatch.setattr(measured, "run", lambda what, where: [*some])
    report.show(run or made.run(), made.topology(chip))
    return capsys.readouterr().out.splitlines()

  return printed


def test_tables_and_a_line_of_json(show):
  lines = show(
    made.measured("prefill"),
    made.measured("gradient", sent={LARGE: 3}),
    chip=CHIPS["v5p"],
  )
  assert lines[0] == (
    "programs of cpu:1x8: mesh (data=1, fsdp=8, tensor=1, expert=1), 2 layers"
  )
  titles = [line for line in lines[1:] if not line.startswith("  ")]
  assert titles[:-1] == [
    "messages of 1 MiB and more, per call or token",
    "time",
    "programs to compile: at most 16 (6 of sampling, 6 of updating, 4 of "
    "evaluation)",
    "checkpoint: 83.01 KiB, written from the shards of 8 devices; at most 4 "
    "kept: 0.32 MiB",
  ]
  read = json.loads(lines[-1])
  # Parameters, two moments and the reference, and three counters.
  assert read["checkpoint_bytes"] == 16 * made.run().parameters + 3 * 4
  assert [m["name"] for m in read["programs"]] == ["prefill", "gradient"]
  assert [p["name"] for p in read["parts"]] == ["prefill", "gradient"]
  assert sum(read["program_counts"].values()) == 16


def test_what_there_is_not_has_no_title(show):
  lines = show(made.measured("prefill"))
  assert not [line for line in lines if line.startswith(("messages", "time"))]
  assert "parts" not in json.loads(lines[-1])


def test_a_fast_plan_says_what_it_compiled(show):
  lines = show(made.measured("prefill"), run=made.run(fast=True))
  assert lines[0].endswith("2 layers, decode with 2 and 3, no evaluation")


def test_what_does_not_fit_is_printed_and_refused(show, capsys):
  over = dict(temp_bytes=made.POOL)
  some = [
    made.measured("prefill", **over),
    made.measured("gradient", **over, kernels=1, new_bytes=3 * 2**20),
    made.measured("apply"),
  ]
  with pytest.raises(TooLarge) as e:
    show(*some)
  # The worst: 2 + 3 MiB more than there are, so not half of its 4 rows' worth.
  assert mentions(
    str(e.value),
    "gradient ... 0.98 GiB ... cpu:1x8 ... optim.rows = 4; nearest that fits, "
    "by its size: optim.rows = 3",
  )
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is False


@pytest.mark.parametrize(
  ("name", "held", "itself", "nearest"),
  [
    # Of twice what there is, half, less what is kept anyway (10 and 20 MB).
    ("score", 0.5, 1.0, "optim.rows = 2"),
    ("decode", 0.0, 2.0, "sampling.slots = 1"),
    ("apply", 0.0, 2.0, "theory.prompts = 7"),
    ("gradient", 1.0, 0.1, None),
    ("gradient", 0.0, 5.0, None),
  ],
)
def test_the_nearest_follows_from_the_size(show, name, held, itself, nearest):
  sizes = dict(held_bytes=held, temp_bytes=itself, new_bytes=0)
  sizes = {k: int(v * made.POOL) for k, v in sizes.items()}
  with pytest.raises(TooLarge) as e:
    show(made.measured(name, **sizes), run=made.run(theory_prompts=16))
  said = str(e.value)
  assert ("nearest" in said) == (nearest is not None)
  assert nearest is None or mentions(said, f"by its size: {nearest}, or choose")


def test_what_just_fits_is_not_refused(show):
  show(made.measured("gradient", temp_bytes=made.POOL - 4 * 2**20))
