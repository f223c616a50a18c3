"""Any text as a response: a verdict in bounded time, and never a false pass.

What a jail does is tested where the jail is. Here an answer meets the code of
the trusted process: what finds it, and what judges it.
"""

import functools
import unicodedata

import fuzzing
import hypothesis
from hypothesis import strategies as st

from brorl_jax.verdicts import code, gym, math, stem
from brorl_jax.verdicts.base import Family
from brorl_jax.verdicts.domains import DRAW
from brorl_jax.verdicts.math import gate
from brorl_jax.verdicts.math.symbolic import symbolic

_SECONDS = 2.0  # of one verdict; the slowest took a quarter


class Near:
  """What the jail would compute, in this process."""

  def ask(self, call, *args, timeout):
    assert call == "symbolic"
    return symbolic(*args)


# LaTeX as a grammar, with pieces that do not belong.
_ATOMS = st.sampled_from([
  *r"0 1 2 12 1,234 0.5 1e999 0x10 . - % x y e i n abc cm Friday A (B) _2 '"
  r" \pi \infty \theta \alpha \emptyset \mathbb{R} ^\circ \% \$ \text{cm} |"
  r" \begin{matrix} \end{matrix} & \\ { } \{ \} \boxed{ \binom{0} \dbinom{2}"
  r" : <think> </think> <answer> </answer>".split(),
  # A half, a minus, infinity, pi, digits of other scripts, a raised digit.
  *"\xbd \u2212 \u221e \u03c0 \u0663 \uff11 \xb2 \x00".split(" "),
  *("answer is ", "9" * 40),
])  # fmt: skip
_FORMS = (
  "{}{}", "{} + {}", "{} - {}", "{}^{{{}}}", "{} = {}", "{}, {}", "{}({})",
  r"\frac{{{}}}{{{}}}", r"\sqrt[{}]{{{}}}", r"\{{{}, {}\}}", "({}, {})",
  "[{}, {})", r"{} \cup {}", r"\pm {} {}", "{}!{}", r"\binom{{{}}}{{{}}}",
  r"\log_{{{}}} {}", r"{} \pmod {{{}}}", r"{} \le {}", r"{} \ne {}", "{}:{}",
  r"\sum_{{k=1}}^{{{}}} {}", r"\int_0^{{{}}} {} dx", r"|{} - {}|", "{}^{}^{}",
  r"\begin{{pmatrix}}{} & {} \\ 1 & 2\end{{pmatrix}}", r"\text{{{}}} {}",
  r"\left({}\right. {}", r"{}\cdot{}", "{} or {}", r"{} \text{{ and }} {}",
)  # fmt: skip
_MADE = st.recursive(_ATOMS,
  lambda each: st.builds(lambda form, a, b, c: form.format(a, b, c),
    st.sampled_from(_FORMS), each, each, each), max_leaves=12)  # fmt: skip
_REPEATED = st.builds(lambda text,
  count: text * count, _ATOMS | st.text(min_size=1, max_size=4),
  st.sampled_from([20, 400, 20_000]))  # fmt: skip
ANSWERS = st.one_of(_MADE, _MADE, st.text(max_size=40),
  st.text(alphabet="{}\\()[]<>/.,^_$&|!- \n0123456789xyzie", max_size=60),
  _REPEATED)  # fmt: skip
RESPONSES = st.builds(
  str.format,
  st.sampled_from([
    "{0}", "\\boxed{{{0}}}", "<think>{0}</think>\\boxed{{{0}}}", "<think>{0}",
    "{0}\\boxed{{1}}", "<answer>{0}</answer>", "The answer is {0}", "**{0}**",
    "Answer:\n\n{0}.", "{0}</think>", "\\boxed{{\\boxed{{{0}}}}}",
    "```python\n{0}\n```",
  ]),
  ANSWERS,
)  # fmt: skip


def spells(text: str, letters: str) -> bool:
  """Whether a text has one of these letters, in whatever form of Unicode."""
  plain = unicodedata.normalize("NFKC", text).casefold()
  plain += unicodedata.normalize("NFKD", text).casefold()
  return any(letter in plain for letter in letters)


# References with a letter that no answer below has.
_GOLDS = st.sampled_from([
  "Q", "Q+1", r"\{Q, 1\}", "Quetzal", "(Q, 1]", r"\frac{Q}{2}", r"\sqrt{Q}",
  r"\begin{pmatrix}Q\\1\end{pmatrix}", r"Q \cup 1", "Qx + 1 = 0", r"Q^\circ",
])  # fmt: skip


def check_math(response, gold):
  hypothesis.assume(not spells(response, "q"))
  with fuzzing.within(_SECONDS):
    verdict = math.verify(response, gold, jail=Near())
  assert verdict.status == "fail" and verdict.score == 0.0
  assert "\n" not in verdict.reason and len(verdict.answer) <= gate.MAX_LENGTH
  if "boxed" not in response:
    assert verdict.reason == "no answer"


# What was wrong once.
_MATH = {
  "a raised digit is a digit and no number": ("\\boxed{\\binom{0}{\xb2}}", "Q")
}
test_math, test_math_at_length = fuzzing.tiers(
  RESPONSES, _GOLDS, few=400, many=100_000, known=_MATH
)(check_math)
_CHOICES = ["a quetzal", "Quebec", "qubits"]
_STEM = st.sampled_from([
  ("B", _CHOICES), ("Q", None), ("quetzal", None), ("Q+1", None),
  ("3.0 Q m/s", None), ("H_2Q", None),
])  # fmt: skip


def check_stem(response, gold):
  answer, choices = gold
  hypothesis.assume(not spells(response, "bq"))
  with fuzzing.within(_SECONDS):
    verdict = stem.verify(response, answer, choices=choices, jail=Near())
  assert verdict.status == "fail"
  assert "\n" not in verdict.reason and len(verdict.answer) <= 1000


test_stem, test_stem_at_length = fuzzing.tiers(
  RESPONSES, _STEM, few=300, many=30_000
)(check_stem)


# Building a puzzle of these takes over a second.
_SLOW = {"rearc", "arc_1d", "tsumego", "mahjong_puzzle", "emoji_mystery"}
_TASKS = sorted(gym.ALLOWED - _SLOW)


@functools.cache
def puzzle(task):
  given = {"max_complexity": 1} if task == "number_sequence" else {}
  return DRAW.puzzle(Family(task, given), "train", 0, seed=0).entry


# Where in the right answer, how much of it is taken, and what comes there.
_EDITS = st.lists(
  st.tuples(st.integers(0, 60), st.integers(0, 2), _ATOMS | st.just("")),
  min_size=1, max_size=3,
)  # fmt: skip


def check_gym(task, answer):
  if isinstance(answer, list):
    edits, answer = answer, puzzle(task)["answer"]
    for at, taken, new in edits:
      answer = answer[:at] + new + answer[at + taken :]
  for response in (answer, f"<answer>{answer}</answer>"):
    with fuzzing.within(_SECONDS):
      verdict = gym.verify(response, puzzle(task), jail=None)
    assert verdict.status == ("pass" if verdict.score >= 1.0 else "fail")
  foreign = "".join("я" if x.isprintable() else " " for x in answer)
  assert gym.verify(foreign, puzzle(task), jail=None).status == "fail"


test_gym, test_gym_at_length = fuzzing.tiers(
  st.sampled_from(_TASKS), _EDITS | RESPONSES, few=200, many=10_000
)(check_gym)


def check_code(response):
  with fuzzing.within(_SECONDS):
    program = code.extract(response)
  assert program is None or program in response or "\r" in response


_FENCES = ["```", "```python\n", "\n```\n", "~~~", "\r\n", "`", "\t"]
test_code, test_code_at_length = fuzzing.tiers(
  st.lists(ANSWERS | st.sampled_from(_FENCES), max_size=8).map("".join),
  few=200, many=100_000,
)(check_code)  # fmt: skip
