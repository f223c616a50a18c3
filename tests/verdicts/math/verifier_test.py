import pytest

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.math import verifier
from brorl_jax.verdicts.math.symbolic import symbolic


class Near:
  """The judge in this process, counting."""

  def __init__(self):
    self.asked = []

  def ask(self, judge, *args, timeout):
    assert (judge, timeout) == ("symbolic", verifier.DEADLINE)
    self.asked.append(args)
    return symbolic(*args)


@pytest.fixture(autouse=True)
def forget():
  verifier._known.clear()


def verify(answer, gold, jail=None):
  return verifier.verify(f"\\boxed{{{answer}}}", gold, jail=jail)


@pytest.mark.parametrize(
  "answer, gold, verdict",
  [
    ("0.5", "1/2", Verdict("pass", 1.0, "", "0.5")),
    ("4", "5", Verdict("fail", 0.0, "wrong answer", "4")),
    (" ", "5", Verdict("fail", 0.0, "empty answer", "")),
    ("5;", "5", Verdict("fail", 0.0, "refused: code-like text", "5;")),
    (
      "5 6",
      "5",
      Verdict("fail", 0.0, "unreadable: two numbers side by side", "5 6"),
    ),
    ("5,,6", "5", Verdict("fail", 0.0, "unreadable: an empty part", "5,,6")),
    (
      r"2400!\cdot2400!",
      "5",
      Verdict("fail", 0.0, "refused: too large", r"2400!\cdot2400!"),
    ),
  ],
)
def test_verdicts_by_hand_need_no_jail(answer, gold, verdict):
  assert verify(answer, gold) == verdict


def test_no_box_is_no_answer():
  assert verifier.verify("5", "5") == Verdict("fail", 0.0, "no answer", "")


def test_a_long_answer_is_shown_cut():
  verdict = verify("1" * 10**6, "5")
  assert verdict.answer == "1" * 400
  assert verdict.reason == "refused: 1000000 characters, at most 400"


def test_the_jail_is_asked_once_for_a_pair():
  jail = Near()
  for _ in range(3):
    assert verify(r"\sqrt{8}", r"2\sqrt2", jail).status == "pass"
    assert verify(r"\sqrt{9.5}", r"2\sqrt2", jail).status == "fail"
  assert len(jail.asked) == 2


def test_a_failed_jail_is_invalid_and_not_remembered():
  class Late:
    def ask(self, judge, *args, timeout):
      raise RuntimeError("late: 3.0 s")

  verdict = verify(r"\sqrt{12}", r"2\sqrt3", Late())
  assert verdict.status == "invalid"
  assert verdict.reason == "verifier failed: late: 3.0 s"
  assert verify(r"\sqrt{12}", r"2\sqrt3", Near()).status == "pass"


def test_what_is_remembered_is_bounded(monkeypatch):
  monkeypatch.setattr(verifier, "_KNOWN_PAIRS", 3)
  jail = Near()
  for n in range(2, 9):
    verify(rf"\sqrt{{{n}}}+\pi", r"\pi", jail)
  assert len(verifier._known) == 3


def test_a_number_with_commas_is_also_a_list():
  assert verify("1,234", "1234").status == "pass"
  assert verify(r"\$1,234", "1234").status == "pass"
  assert verify("1,234", "1, 234").status == "pass"
  assert verify("1,234", "234, 1").status == "pass"
  assert verify("1,234", "1235").status == "fail"


def test_a_gold_that_the_gate_refuses_is_named():
  with pytest.raises(ValueError, match="gold = '9\\^9\\^9': "):
    verify("5", "9^9^9")
