"""What is a step, and which steps are wrong."""

import random

import fuzzing
import pytest
from hypothesis import strategies as st
from solved_by_hand import EXAMPLES, entry_of

from brorl_jax.tasks.gym.steps import QUALITIES, look, write

# Task and lines; for wrong ones how many of the lines are.
RIGHT = [
  # Another order, merged, left out.
  ("chain_sum", "8-70=-62\n57-62=-5"),
  ("chain_sum", "57+8-70=-5"),
  ("chain_sum", "65-70=-5"),
  ("chain_sum", "50+7=57\n57+8=65"),
  ("products", "47*36=1692"),
  ("products", "40*30=1200\n40*6=240\n1200+240=1440\n7*30=210\n1440+210=1650"),
  ("products", "282+1410=1692\n7*6=42"),
  ("gcd", "84-36*2=12\n36-12*3=0"),
  ("gcd", "84%36=12\n36%12=0"),
  ("gcd", "84-36=48\n48-36=12"),
  ("gcd", "84=36*2+12"),
  ("lcm", "28*12=336\n28-12=16\n16-12=4\n336/4=84"),
  ("base_conversion", "1*36+0*6+5=41"),
  ("base_conversion", "3=0*12+3\n41=3*12+5\n6*6+5=41"),
  ("simple_equations", "14*13=182\n17+165=182"),
  ("simple_equations", "182-14*10=42"),
  ("letter_counting", "a r t 0+0=0\nf r e e 0+2=2\nt h e 2+1=3"),
  ("letter_counting", "free the 0+3=3"),
  ("letter_counting", "F r e e t h e a r t 0+3=3"),
  ("letter_counting", "t h e 2+1=3"),
  ("leg_counting", "4*2=8\n10*3=30\n8+30=38"),
  ("leg_counting", "3*10+2*0+4*2=38"),
  ("leg_counting", "30+8=38"),
  ("count_bits", "5=2*2+1 2\n2=2*1+0 2"),
  ("count_bits", "11=2*5+1 1\n1=2*0+1 3"),
  ("prime_factorization", "90/3=30\n30/3=10\n10/5=2"),
  ("prime_factorization", "90/2/3/3=5"),
  ("prime_factorization", "15%2=1"),
  ("countdown", "5*3+7=22"),
  ("countdown", "3*5=15\n7+15=22"),
  ("countdown", "(3)*5+7=22"),
  ("path_star", "9 4\n4 7\n7 8"),
  ("path_star", "9 4 7 8"),
]
WRONG = [
  ("chain_sum", "57+8=66\n66-70=-4", 1),  # the second follows from the first
  ("chain_sum", "57+8=65=66", 1),
  ("chain_sum", "75+8=83", 1),  # no such number
  ("chain_sum", "57+8=64\n64-70=-7", 2),
  ("products", "7*6=41", 1),
  ("products", "9*6=54", 1),
  ("products", "3600+4700=8300", 1),  # no digit is worth that
  ("gcd", "36*2=73\n84-73=11\n11*3=33", 1),
  ("gcd", "85-36=49", 1),
  ("gcd", "84/0=0\n84%0=84", 2),
  ("lcm", "28/3=9", 1),
  ("base_conversion", "0*6+1=1\n1*6+0=7\n7*6+5=47\n47=3*12+11", 1),
  ("base_conversion", "41=3*12+4", 1),
  ("base_conversion", "6*6+9=45", 1),
  ("simple_equations", "17+165=182\n182-14*11=28\n28-14*3=14", 1),
  ("simple_equations", "18+165=183", 1),
  ("letter_counting", "f r e e 0+1=1\nt h e 1+1=2", 1),
  ("letter_counting", "t h e 0+1=2", 1),
  ("letter_counting", "t h e 7+1=8", 1),
  ("letter_counting", "f r e 0+1=1", 1),  # no word
  ("letter_counting", "r e e t h e 0+3=3", 1),
  ("letter_counting", "e 0+1=1", 1),
  ("leg_counting", "3*8=24\n4*2=8\n24+8=32", 1),  # lobsters have ten
  ("leg_counting", "3*10=30\n3*10=30", 1),  # there is one kind of them
  ("leg_counting", "4*10=40", 1),
  ("leg_counting", "3+4=7", 1),
  ("count_bits", "11=2*6+1 1", 1),
  ("count_bits", "11=2*6+0 0\n6=2*3+0 0\n3=2*1+1 1\n1=2*0+1 2", 1),
  ("count_bits", "11=2*5+1 2", 1),
  ("count_bits", "11=2*5+1 1\n5=2*2+1 1", 1),
  ("count_bits", "9=2*4+1 1", 1),
  ("prime_factorization", "90/4=22", 1),
  ("prime_factorization", "45%2=0", 1),
  ("prime_factorization", "80/2=40", 1),
  ("countdown", "5*3=16\n16+7=23", 2),  # the second misses the target
  ("countdown", "5+3=8\n8+7=22", 1),
  ("countdown", "5+3=8\n8+7=15", 1),
  ("countdown", "5+3=8\n5+7=12", 1),  # 5 is used
  ("countdown", "5+3=8\n8+7=15\n5*3=15\n15+7=22", 1),
  ("countdown", "9+3=12", 1),
  ("path_star", "5 8", 1),
  ("path_star", "9 5\n5 6", 1),  # an edge off the way, and what follows
  ("path_star", "5 6", 1),
  ("path_star", "9 5\n5 8", 2),  # no edge leads on like that
  ("path_star", "9 4\n9 5", 1),  # off the way, from a node that is on it
  ("path_star", "8 7", 1),
  ("path_star", "9 4 8", 1),
]


@pytest.mark.parametrize("task, lines", RIGHT)
def test_right_steps_are_right_in_any_order_and_merged(task, lines):
  count = lines.count("\n") + 1
  assert look(lines, entry_of(task)) == (count, 0, 0)


@pytest.mark.parametrize("task, lines, wrong", WRONG)
def test_wrong_steps_by_hand(task, lines, wrong):
  count = lines.count("\n") + 1
  assert look(lines, entry_of(task)) == (count, wrong, 0)
  back = lines.replace("\n", " no\n") + " no"
  assert look(back, entry_of(task)) == (count, 0, count)


def test_nothing_is_kept_of_a_line_that_is_taken_back():
  lines = "57+8=66 no\n66-70=-4\n57+8=65"
  assert look(lines, entry_of("chain_sum")) == (3, 1, 1)
  lines = "f r e e 0+4=4 no\nf r e e 0+2=2\nt h e 4+1=5"
  assert look(lines, entry_of("letter_counting")) == (3, 1, 1)
  lines = "3*10=30 no\n3*10=30\n2*0=9 no\n9+30=39"
  assert look(lines, entry_of("leg_counting")) == (4, 1, 2)
  lines = "5 8 no\n9 5\n5 6"
  assert look(lines, entry_of("path_star")) == (3, 1, 1)
  lines = "11=2*4+1 1 no\n4=2*2+0 1"
  assert look(lines, entry_of("count_bits")) == (2, 1, 1)


def test_after_a_failed_attempt_all_numbers_are_in_hand_again():
  entry = entry_of("countdown")
  failed = "5+3=8\n8+7=15 no\n"
  assert look(f"{failed}5*3=15\n15+7=22", entry) == (4, 0, 1)
  assert look(f"{failed}{failed}5*3=15\n15+7=22", entry) == (6, 0, 2)
  # Only the last line was wrong, and is mended.
  assert look("5*3=15\n15+7=23 no\n15+7=22", entry) == (3, 0, 1)
  assert look("5*3=14 no\n5*3=15\n15+7=22", entry) == (3, 0, 1)
  assert look("5+3=8 no\n8+7=15", entry) == (2, 1, 1)
  # Both hands fit: 7 is one of the numbers, and the result of an attempt.
  metadata = {"numbers": [6, 1, 1], "target": 6}
  entry = {"metadata": metadata | {"source_dataset": "countdown"}}
  lines = "6/1=6\n6+1=7 no\n6+1=7\n7-1=6"
  assert look(lines, entry) == (4, 0, 1)


def countdown(target, *numbers):
  metadata = {"numbers": list(numbers), "target": target}
  return {"metadata": metadata | {"source_dataset": "countdown"}}


def test_of_two_hands_one_that_misses_the_target_is_given_up():
  """After the third line the numbers may be 2, 3, 1, 1 or 2, 3.

  2+3=5 misses 7 with the latter, so that 1, 1, 5 are in hand: 2 and 3 are not.
  """
  lines = "1*1=1\n1*2=2\n3-2=2 no\n2+3=5"
  assert look(f"{lines}\n5+1=6", countdown(7, 2, 3, 1, 1)) == (5, 0, 1)
  assert look(f"{lines}\n2*3=6", countdown(7, 2, 3, 1, 1)) == (5, 1, 1)


def test_three_hands_are_kept():
  """Lines taken back twice: after 5+1=6 the third hand is done, and 2 and 3 are
  free again.
  """
  lines = "1*1=1\n2+3=6 no\n2+3=5\n5+1=7 no\n5+1=6\n2*3=6"
  assert look(lines, countdown(6, 1, 1, 2, 3)) == (6, 0, 2)


def test_a_number_alone_is_no_step_of_countdown():
  assert look("7=7\n5*3=15", entry_of("countdown")) == (1, 0, 0)


def test_digits_of_a_number_in_base_ten_are_known():
  metadata = {"source_base": 10, "target_base": 16, "source_repr": "407"}
  metadata |= {"decimal_value": 407, "source_dataset": "base_conversion"}
  assert look("4*100+0*10+7=407", {"metadata": metadata}) == (1, 0, 0)
  assert look("3*100+0*10+7=307", {"metadata": metadata}) == (1, 1, 0)


GARBAGE = [
  "",
  "\n\n\n",
  " no",
  "no",
  "= no",
  "=",
  "1=",
  "=1",
  "1==1",
  "57 + 8 = 65",
  "57+8=65 ",
  "57+8=65\r",
  "57+8=65 No",
  "57+8=65  no",
  "57+8",
  "57+8=x",
  "57+-+8=65",
  "57**8=65",
  "57//8=7",
  "5.7+8=13.7",
  "57+8=65;",
  "1e3+1=1001",
  "0x1+1=2",
  "1_0+1=11",
  "\u0665\u0667+\u0668=\u0666\u0665",
  "\uff15\uff17+8=65",
  "57+\xb2=59",
  "57\u22128=49",
  "57+8=65\u2028",
  "\x0057+8=65",
  "<answer>57+8=65</answer>",
  "<answer>57+8=65",
  "</answer><answer>",
  "__import__('os')=1",
  "(57+8)=65",
  "57",
  "free",
  "f r e e 2",
  "0+2=2 f r e e",
  "9999999999999+1=10000000000000",
  "9" * 10_000 + "=" + "9" * 10_000,
  "9**9**9**9=1",
  "+".join(["1"] * 10_000) + "=10000",
  "=".join(["1"] * 10_000),
  "*".join(["999999999999"] * 1_000) + "=1",
  "(" * 5_000 + "1" + ")" * 5_000 + "=1",
  "a " * 10_000 + "0+0=0",
  "1 " * 10_000,
  " " * 10_000 + "0+0=0",
]


# Countdown may have blanks and brackets.
_OF_COUNTDOWN = ("57 + 8 = 65", "57+8=65 ", "(57+8)=65")


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_no_step(text):
  for task in EXAMPLES:
    if task != "countdown" or text not in _OF_COUNTDOWN:
      assert look(text, entry_of(task)) == (0, 0, 0), task


@pytest.mark.parametrize(
  "line",
  [
    "57+8=65\n",
    "1=" * 99 + "1\n",
    "999999999999*" * 15 + "1=1\n",
    "a b 1+1=2\n",
    "a " * 96 + "1+1=2\n",
    "1 2\n",
    "3+5=8 no\n",
    "(" * 90 + "1+1" + ")" * 90 + "=2\n",
    "11=2*5+1 1\n",
    "3/7-7/3-1/9*" * 16 + "1=1\n",
    "<answer>",
    " no\n",
    "\n",
    "7",
    " ",
  ],
)
def test_a_long_response_is_read_in_linear_time(line):
  text = line * (60_000 // len(line))
  for task in EXAMPLES:
    with fuzzing.within(2.0):
      seen = look(text, entry_of(task))
    assert 0 <= seen.wrong <= seen.count <= text.count("\n") + 1


@pytest.mark.parametrize("task", EXAMPLES)
def test_responses_of_other_tasks_are_no_right_steps(task):
  for other in EXAMPLES:
    if other == task:
      continue
    for quality in QUALITIES:
      response = write(entry_of(other), quality, random.Random(1))
      seen = look(response, entry_of(task))
      assert seen.count <= response.count("\n")


PIECES = st.sampled_from([
  *"0123456789+-*/%=() \n", " no", " no\n", "f r e e ", "57", "<answer>",
  "</answer>", "\u0663", "\xb2", "\r", "\u2028", "\ud800", "9" * 13,
])  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=60).map("".join))


def check(task, text, cut):
  entry = entry_of(task)
  seen = look(text, entry)
  assert 0 <= seen.wrong + seen.taken_back <= seen.count
  assert seen.count <= text.count("\n") + 1
  # Also within a response, and cut anywhere.
  careful = write(entry, "careful", random.Random(0))
  look(careful[:cut] + text + careful[cut:], entry)
  whole, part = look(careful, entry), look(careful[:cut], entry)
  assert part.count <= whole.count and part.wrong <= 1


test_any_text, test_more_texts = fuzzing.tiers(
  st.sampled_from(sorted(EXAMPLES)),
  TEXTS,
  st.integers(0, 80),
  few=150,
  many=20_000,
)(check)
