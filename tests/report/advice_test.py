"""Tests of brorl_jax/report/advice.py."""

import json

import pytest

from brorl_jax.errors import UserError
from brorl_jax.main.commands import report as report_command
from brorl_jax.report import advice


def row(n, snr, seconds, *, error=0.01, informative=0.5):
  return {
    "n": n, "informative": informative, "coefficient": 0.5, "norm": 1.0,
    "samples_per_group": n / informative if informative else None,
    "signal": snr, "noise": 1.0, "signal_error": error, "snr": snr,
    "snr_error": error, "cosine": 0.9, "tokens": 10 * n,
    "rollout_s": seconds / 2, "update_s": seconds / 2,
  }  # fmt: skip


def data(*rows, right=(0, 3, 64, 64), blocks=8):
  return {
    "n": 64, "advantage": "leave_one_out", "blocks": blocks, "right": [*right],
    "rows": [*rows],
  }  # fmt: skip


def test_most_signal_to_noise_per_second_is_recommended():
  rows = [row(64, 0.8, 10.0), row(16, 0.5, 2.0), row(4, 0.1, 1.0)]
  assert advice.recommended(data(*rows))["n"] == 16
  assert advice.per_second(rows[1]) == 0.25


def test_of_equals_the_largest():
  rows = [row(64, 0.8, 3.6), row(16, 0.5, 2.0), row(4, 0.3, 1.2)]
  assert advice.recommended(data(*rows))["n"] == 16  # .222, .25, .25
  rows[0] = row(64, 0.8, 3.4)
  assert (
    advice.recommended(data(*rows))["n"] == 64
  )  # .235 is more than .9 x .25


def test_noise_is_not_recommended():
  rows = [row(64, 0.02, 1.0), row(16, 0.5, 0.1, error=0.3), row(4, -0.5, 0.1)]
  assert advice.recommended(data(*rows)) is None
  said = advice.advice(data(*rows))
  assert "No N is recommended" in said and "config.sampling.samples" in said
  assert (
    advice.recommended(data({**rows[0], "snr": None, "signal": 0.0})) is None
  )


def test_what_may_be_better_is_named():
  rows = [row(64, 0.8, 2.0), row(16, 0.6, 1.0, error=0.4), row(4, 0.1, 1.0)]
  said = advice.advice(data(*rows))
  assert said.startswith("N = 64") and "N = 16 may be better still" in said
  assert "may be" not in advice.advice(data(rows[0], rows[2]))
  # Nor one that is told well enough, and is no better.
  rows = [row(64, 0.8, 2.0), row(16, 0.45, 1.0)]
  assert "N = 64" in advice.advice(data(*rows))
  assert "may be" not in advice.advice(data(*rows))


def test_few_blocks_tell_nothing():
  rows = [row(64, 0.8, 2.0)]
  assert advice.recommended(data(*rows)) is rows[0]
  assert advice.recommended(data(*rows, blocks=7)) is None
  assert "at least 8 are needed" in advice.advice(data(*rows, blocks=7))


def test_the_advice_says_which_prompts_there_are():
  said = advice.advice(data(row(64, 0.8, 1.0, informative=0.75)))
  assert said.startswith("N = 64 is recommended: with 'leave_one_out'")
  assert "0.25 of 4 prompts have no right rollout of 64" in said
  assert "0.25 some but less than a tenth, 0.50 nine tenths" in said


def test_table_and_figure_of_what_there_is(tmp_path, capsys):
  empty = {**row(4, 0.0, 0.0, informative=0.0), "snr": None, "snr_error": None}
  empty["cosine"] = None
  (tmp_path / advice.FILE).write_text(
    json.dumps(data(row(64, 0.8, 2.0), empty))
  )
  report_command.run([tmp_path])
  head, first, last, *rest = capsys.readouterr().out.splitlines()
  assert head.split()[:4] == [
    "N",
    "informative",
    "samples/group",
    "coefficient",
  ]
  assert first.split() == [
    "64", "0.500", "128.0", "0.5000", "1.0000", "0.900", "0.800", "0.010",
    "1.00", "1.00",
  ]  # fmt: skip
  assert last.split()[2] == "n/a" and last.split()[6] == "n/a"
  assert rest[-1].endswith(advice.FIGURE)
  assert (tmp_path / advice.FIGURE).stat().st_size > 10_000


@pytest.mark.parametrize(
  "text",
  [
    "{",
    "{}",
    '{"rows": [], "right": [1]}',
    json.dumps(data(row(64, 0.8, 2.0), right=())),
    json.dumps(data({"n": 4, "snr": 0.1})),
  ],
)
def test_what_is_no_advice_is_refused(tmp_path, text):
  (tmp_path / advice.FILE).write_text(text)
  with pytest.raises(UserError, match="run --mode=advise again"):
    report_command.run([tmp_path])


def test_advice_is_shown_by_itself(tmp_path):
  (tmp_path / advice.FILE).write_text(json.dumps(data(row(64, 0.8, 2.0))))
  with pytest.raises(UserError, match="give one --workdir"):
    report_command.run([tmp_path, tmp_path / "other"])
