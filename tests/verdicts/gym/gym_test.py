import builtins
import collections
import hashlib
import inspect
import json
import math
import os
import sys

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from launchers import ran
from messages import mentions, refuses
from solved_by_hand import entry

reasoning_gym = pytest.importorskip("reasoning_gym")

from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.gym import Family, check, heldout, puzzle, verify
from brorl_jax.verdicts.sandbox.jail import Failed

SMALL = [
  Family("letter_counting", {"min_words": 2, "max_words": 3}),
  Family("count_primes", {"min_n": 1, "max_n": 50}),
  Family("leg_counting", {"min_animals": 1, "max_animals": 2,
    "min_instances": 1, "max_instances": 3}),
  Family("gcd", {"min_value": 1, "max_value": 40}),
  Family("basic_arithmetic", {"min_terms": 2, "max_terms": 3, "min_digits": 1,
    "max_digits": 1, "operators": ["+", "-", "*"], "allow_parentheses": False}),
  Family("number_sequence", {"min_terms": 4, "max_terms": 5, "min_value": -10,
    "max_value": 10, "max_complexity": 1}),
  Family("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
  Family("simple_equations", {"min_terms": 2, "max_terms": 2, "min_value": 1,
    "max_value": 10, "operators": ["+", "-"], "operators_weights": [0.5, 0.5]}),
]  # fmt: skip
# The library's default for number_sequence takes 10 s for some puzzles.
EVERY = [
  Family(name, {"max_complexity": 2} if name == "number_sequence" else {})
  for name in sorted(gym.ALLOWED)
]
NAMES = [family.name for family in EVERY]
# Their puzzles have many right answers, and one may be another's.
MANY = (
  "countdown graph_color jugs n_queens propositional_logic puzzle24".split()
)


def held_out(family, question):
  digest = hashlib.blake2b(f"{family.name}\n{question}".encode(), digest_size=8)
  return int.from_bytes(digest.digest(), "little") % 10 == 0


@pytest.fixture(scope="module")
def drawn():
  return {family.name: [puzzle(family, "train", i, seed=0) for i in range(4)]
    for family in EVERY}  # fmt: skip


# Reading the answer out of a response.


@pytest.mark.parametrize("response, answer, status", [
  ("so <answer>\n 4\t</answer> it is", "4", "pass"), (" \n4 ", "4", "pass"),
  ("<answer>3</answer> no, <answer>4</answer>", "4", "pass"),
  ("<answer>4</answer> or <answer>5", "4", "pass"),
  ("</answer><answer>4</answer></answer>", "4", "pass"),
  ("<answer>3 <answer>4</answer>", "4", "pass"),
  ("<answer>4</answer> no, <answer>3</answer>", "3", "fail"),
  ("<answer>4", "<answer>4", "fail"), ("4</answer>", "4</answer>", "fail"),
  ("<Answer>4</Answer>", "<Answer>4</Answer>", "fail"),
  ("<answer>44</answer>", "44", "fail"), ("-4", "-4", "fail"),
  ("\uff14", "\uff14", "fail"), ("4\x00", "4\x00", "fail"),
  ("4 or", "4 or", "fail"), ("  \n", "", "fail"),
  ("4 <answer> \t</answer>", "", "fail"),
])  # fmt: skip
def test_the_last_complete_answer_counts(response, answer, status):
  verdict = verify(response, entry())
  assert (verdict.status, verdict.answer) == (status, answer)
  assert verdict.reward == (status == "pass")
  fault = "wrong answer" if answer else "empty answer"
  assert verdict.reason == ("" if status == "pass" else fault)
  assert (verdict.score >= 1.0) is (status == "pass")
  assert response != "4 or" or verdict.score == 0.25  # the library's


@given(st.text(alphabet="abc<>/ \n", max_size=40),
  st.text(alphabet="0123456789-. ", max_size=20),
  st.text(alphabet="abc<>/ \n", max_size=40))  # fmt: skip
def test_text_around_the_tags_changes_nothing(before, answer, after):
  verdict = verify(f"{before}<answer>{answer}</answer>{after}", entry())
  assert verdict.answer == answer.strip()
  assert verdict.status == ("pass" if answer.strip() == "4" else "fail")


def test_long_answers_never_reach_the_scorer(monkeypatch):
  seen = []
  monkeypatch.setattr(
    gym, "scorer", lambda name: lambda answer, entry: seen.append(answer) or 1
  )
  assert verify("x" * 1_000, entry()).status == "pass"
  verdict = verify("x" * 1_001, entry())
  assert verdict.status == "fail"
  assert verdict.reason == "too long: 1001 characters, at most 1000"
  assert verdict.answer == "x" * 1_000
  assert seen == ["x" * 1_000]


def test_a_flood_of_tags_is_read_in_linear_time():
  # A backtracking search for <answer>.*</answer> would take hours.
  flood = "<answer>" * 200_000
  assert verify(flood, entry()).reason.startswith("too long: 1600000")
  assert verify(flood + "4</answer>", entry()).status == "pass"
  assert verify("<answer>4" + "</answer>" * 200_000, entry()).reward == 1.0


# What the scorer may do.


def test_an_entry_that_breaks_its_scorer_is_invalid():
  damaged = entry("mini_sudoku", "1 2\n2 1")  # the metadata lost its solution
  verdict = verify("1 2\n2 1", damaged)
  assert (verdict.status, verdict.reward) == ("invalid", 0.0)
  assert verdict.reason == "scorer raised KeyError on its own answer"


@pytest.mark.parametrize("score, status, kept, reason", [
  (math.nan, "fail", 0.0, "scorer returned nan"),
  (math.inf, "fail", 0.0, "scorer returned inf"),
  (math.nextafter(1.0, 0.0), "fail", math.nextafter(1.0, 0.0),
    "wrong answer"),
  (1.0, "pass", 1.0, ""),
  (RecursionError("deep"), "fail", 0.0, "scorer raised RecursionError"),
])  # fmt: skip
def test_only_a_finite_one_passes(monkeypatch, score, status, kept, reason):
  def scored(answer, entry):
    if answer != entry["answer"] and isinstance(score, Exception):
      raise score
    return score if answer != entry["answer"] else 1.0

  monkeypatch.setattr(gym, "scorer", lambda name: scored)
  assert verify("5", entry()) == Verdict(status, kept, reason, "5")


HANDS = "Ann is a knight, and Bob is a knave."


@pytest.mark.parametrize("name, oracle, metadata, right, wrong", [
  (
    # The library gives nine letters 9 * (1 / 9) = 1.0000000000000002.
    "spell_backward", "ralucones", {}, ["ralucones", "RALUCONES"],
    ["ralucones0", "ralucones ralucones", "seno"],
  ),
  ("fraction_simplification", "$\\frac{3}{7}$", {"simplified_numerator": 3,
    "simplified_denominator": 7, "numerator": 6, "denominator": 14}, ["3/7",
    "$3/7$", "3 / 7", "\\frac{3}{7}", "$\\dfrac{3}{7}$"], ["6/14",
    "\\frac{3}{7} or \\frac{1}{2}", "$\\frac{3}{7}$0", "3/7 7"]),
  ("knights_knaves", HANDS, {}, [HANDS, "Bob is a knave and Ann is a knight",
    "ann knight, bob knave"], ["I think " + HANDS, HANDS + " " + HANDS,
    HANDS + " Or not.", "Ann is a knave, and Bob is a knight."]),
  ("letter_jumble", "the sea", {}, ["the sea", "The Sea", "the  sea"],
    ["the sea and more", "sea the"]),
  ("word_sorting", "ant, bee", {"sorted_words": ["ant", "bee"]}, ["ant, bee",
    "ant,bee"], ["ant, bee, cow", "ant, bee,", "bee, ant"]),
  ("chain_sum", "1000", {}, ["1,000", "1000.0", "+1000"], ["100", "1000 0"]),
  ("products", "-12", {}, ["-12", "-12.00"], ["12", "-12x", "- 12"]),
])  # fmt: skip
def test_the_answer_and_nothing_else(name, oracle, metadata, right, wrong):
  item = entry(name, oracle, **metadata)
  assert [verify(a, item).status for a in right] == ["pass"] * len(right)
  assert [verify(a, item).status for a in wrong] == ["fail"] * len(wrong)
  assert all(verify(a, item).score < 1.0 for a in wrong)


# Scorers that evaluate.


class Fake:
  def __init__(self, says):
    self.says, self.asked = says, []

  def ask(self, *args, timeout):
    self.asked.append((*args, timeout))
    if isinstance(self.says, Exception):
      raise self.says
    return self.says


INTEGRAL = entry(
  "intermediate_integration", "x**2 + C", integrand="2*x", variable="x"
)


@pytest.mark.parametrize("says, verdict", [
  (1.0, ("pass", 1.0, "")), (0.25, ("fail", 0.25, "wrong answer")),
  (math.nan, ("fail", 0.0, "scorer returned nan")),
  ({"raised": "TypeError"}, ("fail", 0.0, "scorer raised TypeError")),
  (Failed("3 s late"), ("invalid", 0.0, "verifier failed: 3 s late")),
])  # fmt: skip
def test_a_scorer_that_evaluates_is_asked_in_a_jail(says, verdict):
  jail = Fake(says)
  got = verify("<answer>x**2 + 3</answer>", INTEGRAL, jail=jail)
  assert (got.status, got.score, got.reason) == verdict
  assert got.answer == "x**2 + 3"
  ((judge_name, answer, asked, timeout),) = jail.asked
  assert (judge_name, answer, timeout) == ("gym", "x**2 + 3", 3.0)
  assert json.loads(json.dumps(asked))["metadata"] == INTEGRAL["metadata"]


@pytest.mark.parametrize("answer", [
  "Integral(2*x, x)",  # its derivative is right
  "__import__('os').getpid()", "x**2 + y", "9**9**9", "x**2 + C = 0",
])  # fmt: skip
def test_the_jail_sees_only_what_the_grammar_lets_through(answer):
  jail = Fake(1.0)
  verdict = verify(answer, INTEGRAL, jail=jail)
  assert (verdict.status, verdict.code) == ("fail", "refused")
  assert jail.asked == []


@pytest.mark.parametrize("answer, integrand, status", [
  ("x**2 + C", "2*x", "pass"), ("(x + 1)**2 - 7", "2*x + 2", "pass"),
  ("sin(x)**2/2", "sin(x)*cos(x)", "pass"),
  ("-cos(x)**2/2 + C", "sin(x)*cos(x)", "pass"),
  ("E**(2*x)/2", "exp(2*x)", "pass"), ("x**2 + C*x", "2*x", "fail"),
  ("x**3", "2*x", "fail"), ("x/0", "2*x", "fail"), ("x**2 +", "2*x", "fail"),
])  # fmt: skip
def test_integrals_are_scored_by_their_derivatives(answer, integrand, status):
  """The library's scorer behind the grammar, in this process."""

  class Here:
    def ask(self, name, answer, asked, timeout):
      return gym.scorer("intermediate_integration")(answer, asked)

  metadata = INTEGRAL["metadata"] | {"integrand": integrand}
  item = INTEGRAL | {"metadata": metadata}
  assert verify(answer, item, jail=Here()).status == status


# Which tasks are allowed.


def test_stored_tasks_are_judged_and_not_drawn():
  for name, why in gym.STORED.items():
    metadata = {"variable": "x", "solution": [[4]], "board_size": 1}
    assert verify("4", entry(name, **metadata), jail=Fake(1.0)).answer == "4"
    for draw in (lambda family: puzzle(family, "train", 0, seed=0),
      lambda family: check([family])):  # fmt: skip
      with refuses(ValueError, f"{name!r} ... {why} ... data file"):
        draw(Family(name))


@pytest.mark.parametrize("use", [
  lambda name: verify("4", entry(name)), lambda name: check([Family(name)]),
  lambda name: puzzle(Family(name), "train", 0, seed=0),
])  # fmt: skip
def test_refused_tasks_say_why(use):
  for name, why in gym.REFUSED.items():
    with refuses(ValueError, f"{name!r} ... {why}"):
      use(name)
  with refuses(ValueError, "'gdc' ... unknown ... 'gcd'"):
    use("gdc")


def test_the_lists_are_about_tasks_that_exist():
  known = reasoning_gym.factory.DATASETS.keys()
  sets = [gym.ALLOWED, gym.STORED.keys(), gym.REFUSED.keys()]
  assert (set().union(*sets), sum(map(len, sets))) == (known, len(known))
  assert len(gym.ALLOWED) >= 70
  usable = gym.ALLOWED | gym.STORED.keys()
  for table in (gym.checks.CHECKS, gym.checks.FORMS, gym.JAILED, gym.LONGEST):
    assert usable >= set(table)


@pytest.mark.parametrize("response, broken, named", [
  ("4", {}, "metadata.source_dataset"),
  ("4", {"answer": "4", "metadata": None}, "metadata.source_dataset"),
  ("4", {"answer": "4", "metadata": {"source_dataset": 3}}, "source_dataset"),
  ("4", entry(answer=None), "entry.answer = None of task 'gcd'"),
  (b"4", entry(), "is a bytes"),
])  # fmt: skip
def test_entries_without_task_or_answer_are_refused(response, broken, named):
  with pytest.raises(ValueError, match=named):
    verify(response, broken)


SCORED = sorted(
  (gym.ALLOWED | gym.STORED.keys()) - gym.checks.CHECKS.keys() - gym.JAILED
)


def test_scorers_read_neither_code_nor_settings():
  for name in SCORED:
    cls, _ = reasoning_gym.factory.DATASETS[name]
    source = inspect.getsource(cls.score_answer)
    for word in ("eval(", "exec(", "parse_expr", "sympify", "self.config"):
      assert word not in source, name


@pytest.mark.parametrize("name", tiers.some(NAMES, 1))
def test_the_oracle_passes_and_its_neighbours_fail(name, drawn):
  for p in drawn[name]:
    oracle = p.entry["answer"]
    assert verify(oracle, p.entry).status == "pass"
    assert verify(f"<answer> {oracle}\n</answer>", p.entry).status == "pass"
    assert verify(oracle, json.loads(json.dumps(p.entry))).status == "pass"
    for other in drawn[name]:
      wrong = other.entry["answer"]
      if wrong.lower() != oracle.lower() and name not in MANY:
        assert verify(wrong, p.entry).status == "fail", (wrong, oracle)


def hostile(marker):
  code = f"open({str(marker)!r}, 'w').close()"
  return [
    code, f"__import__('os').system('touch {marker}')", f"[{code}]",
    f"(lambda: {code})()", f"{{{code}: 1}}", f"'1' if {code} else '2'",
    f"().__class__.__base__.__subclasses__() or {code}", f"f'{{{code}}}'",
    "[" * 1_000, "(" * 500 + ")" * 500, "{" * 999, "[[" * 200 + "]]" * 200,
    "9" * 1_000, "-" + "9" * 999, "1e999999999", "-1E+999999999999999999",
    "1/" + "9" * 990, "9**9**9**9", "0x" + "f" * 990, "nan", "sNaN", "-inf",
    "Infinity", "None", "null", "{}", "[]", '[[""]]', "\x00", "\x1b[2J\x07",
    "\u202e\u2066", "\ud800", "½ Ⅳ ①", "\U0001f600" * 500, "%s%n{0.__class__}",
    "$(reboot)`reboot`", "'; DROP TABLE answers; --", "is a an and , . ( )",
    "\\frac{1}{0}", "1/0", "," * 1_000, "= " * 400, "right " * 160, "true",
    "a" * 1_000,
  ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_hostile_answers_fail_and_nothing_runs(
  name, drawn, tmp_path, monkeypatch, capfd
):
  marker = tmp_path / "executed"
  calls = []
  for builtin in ("eval", "exec", "compile"):
    monkeypatch.setattr(builtins, builtin, lambda *a, **k: calls.append(a))
  verdicts = []
  for p in drawn[name]:
    oracle = p.entry["answer"]
    answers = hostile(marker)
    answers += [f"{oracle} or not", f"not {oracle}", f"{oracle}\nx"]
    answers += [f"{oracle}{oracle}", f"x={oracle}", f"{oracle}|{oracle}"]
    # Not wrong where it is what the puzzle asks for.
    answers = [a for a in answers if a.lower() != oracle.lower()]
    verdicts += [(verify(a, p.entry), oracle) for a in answers]
  monkeypatch.undo()
  assert [(v, o) for v, o in verdicts if v.status != "fail"] == []
  assert len(verdicts) > 150
  assert calls == []
  assert not marker.exists()
  assert capfd.readouterr().out == ""


# Drawing puzzles.


@given(
  st.sampled_from(gym.SPLITS), st.integers(0, 2**44 - 1), st.integers(0, 2**80)
)
@settings(max_examples=60, deadline=None)
def test_every_index_owns_its_generator_seeds(split, index, seed):
  p = puzzle(Family("count_bits"), split, index, seed=seed)
  owner, low = divmod(p.entry["metadata"]["source_index"], 2**10)
  rest, owned_index = divmod(owner, 2**44)
  assert low < 2**10
  assert owned_index == index
  assert divmod(rest, 4) == (seed, gym.SPLITS.index(split))


@pytest.mark.parametrize("family", tiers.some(EVERY, 5), ids=NAMES)
def test_a_puzzle_depends_on_its_generator_seed_alone(family, drawn):
  def fresh(seed, item):
    return reasoning_gym.create_dataset(
      family.name, size=item + 1, seed=seed - item, **family.settings
    )[item]

  # The seeds come from the layout: circuit_logic reports another source_index.
  for index in (3, 1):
    seeds = range(index * 1024, (index + 1) * 1024)
    g = next(i for i in seeds if not held_out(family, fresh(i, 0)["question"]))
    for item in (0, 3):
      twin = fresh(g, item)
      p = drawn[family.name][index]
      assert twin["question"] == p.question
      assert twin["answer"] in (p.entry["answer"], None)  # of many, none


@pytest.mark.parametrize(
  "family", tiers.some(SMALL, 2), ids=[f.name for f in SMALL]
)
def test_splits_share_neither_seeds_nor_questions(family):
  counts = {"train": 400, "warmup": 400, "heldout": 80}
  texts, seeds = {}, []
  for split, count in counts.items():
    drawn = [puzzle(family, split, i, seed=0) for i in range(count)]
    # Another run's training data must not hold this one's held-out questions.
    drawn += [puzzle(family, split, i, seed=9) for i in range(count // 4)]
    texts[split] = {p.question for p in drawn}
    seeds += [p.entry["metadata"]["source_index"] for p in drawn]
  assert texts["heldout"].isdisjoint(texts["train"] | texts["warmup"])
  assert len(seeds) == len(set(seeds))
  for split, questions in texts.items():
    for question in questions:
      assert held_out(family, question) == (split == "heldout")


SCRIPT = """
import hashlib, json, sys
from brorl_jax.verdicts.gym import Family, puzzle
assert "jax" not in sys.modules
for name, settings in json.load(sys.stdin):
  drawn = [puzzle(Family(name, settings), s, i, seed=5)
           for s in ("train", "heldout") for i in range(3)]
  text = json.dumps([p.entry for p in drawn])
  print(name, hashlib.blake2b(text.encode()).hexdigest())
"""


@pytest.mark.slow
def test_puzzles_do_not_depend_on_the_hash_seed():
  wanted = json.dumps([(f.name, dict(f.settings)) for f in EVERY])
  outputs = []
  for hash_seed in ("1", "4242"):
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    how = dict(input=wanted, env=env, check=True)
    outputs.append(ran(sys.executable, "-c", SCRIPT, **how).stdout.splitlines())
  assert outputs[0] == outputs[1]
  assert [line.split()[0] for line in outputs[0]] == NAMES


def test_puzzles_never_change():
  p = puzzle(SMALL[3], "heldout", 7, seed=2)
  assert (p.id, p.task) == ("gcd/heldout/7", "gcd")
  assert p.question == p.entry["question"]
  # Recorded once. A change here makes held-out scores incomparable.
  assert [
    puzzle(SMALL[6], s, 3, seed=1).entry["answer"] for s in gym.SPLITS
  ] == (["cnab", "nauJ", "agiv"])


# Held-out sets.


def test_heldout_questions_are_distinct_and_in_order():
  families = [SMALL[3], SMALL[0]]
  puzzles = heldout(families, per_family=60, seed=0)
  assert [p.task for p in puzzles] == ["gcd"] * 60 + ["letter_counting"] * 60
  assert len({p.question for p in puzzles}) == 120
  assert {p.id.split("/")[1] for p in puzzles} == {"heldout"}
  small = heldout(families[:1], per_family=10, seed=0)
  assert small == puzzles[:10] != heldout(families[:1], per_family=10, seed=1)


def test_a_family_can_be_exhausted_and_no_further():
  tiny = Family("count_bits", {"min_n": 1, "max_n": 100})
  text = "How many 1 bits are there in the binary representation of the number"
  numbers = {str(n) for n in range(1, 101) if held_out(tiny, f"{text} {n}?")}
  assert len(numbers) > 3
  # Many seeds: giving up too early would miss the last number of a third.
  for seed in range(15):
    found = heldout([tiny], per_family=len(numbers), seed=seed)
    assert {str(p.entry["metadata"]["number"]) for p in found} == numbers
  said = f"'count_bits' ... min_n=1, max_n=100 ... only {len(numbers)} distinct"
  with refuses(ValueError, said):
    heldout([tiny], per_family=len(numbers) + 1, seed=0)

  assert heldout([tiny], per_family=99, seed=14, fewer=True) == found


def test_a_generator_may_fail_now_and_then(monkeypatch):
  class Drawn(dict):
    config = None

    def __missing__(self, number):
      if number % 1024 < self["fails"]:
        raise ValueError("no path")
      return entry(question=f"{number}")

  data = Drawn(fails=7)
  monkeypatch.setattr(gym, "_dataset", lambda family: data)
  assert puzzle(Family("maze"), "train", 0, seed=0).task == "maze"
  data["fails"] = 8
  with refuses(ValueError, "cannot generate a puzzle: no path"):
    puzzle(Family("maze"), "train", 0, seed=0)


def test_a_family_of_one_question_has_no_other_side():
  one = Family("count_bits", {"min_n": 6, "max_n": 6})
  sides = collections.Counter()
  for split in gym.SPLITS:
    try:
      assert puzzle(one, split, 0, seed=0).entry["answer"] == "2"
      sides["found"] += 1
    except ValueError as error:
      sides["missing"] += 1
      assert mentions(str(error), f"min_n=6, max_n=6 ... {split}")
  assert sides["found"] in (1, 2) and sides["missing"] == 3 - sides["found"]
  with pytest.raises(ValueError, match="question in 1024 tries"):
    check([one])


# Refusals.


@pytest.mark.parametrize("families, named", [
  ([], "families is empty"), ([Family("gdc")], "'gdc' ... unknown ... 'gcd'"),
  ([Family("gcd", {"max_vlue": 3})], "'gcd' ... max_vlue = 3 ... max_value"),
  ([Family("gcd", {"seed": 3})], "seed = 3 ... unknown ... min_numbers"),
  ([Family("gcd", {"size": 3})], "size = 3 ... unknown"),
  ([Family("gcd", {"max_value": "40"})], "max_value = '40' ... 1000"),
  ([Family("gcd", {"max_value": 4.0})], "max_value = 4.0 ... float"),
  ([Family("gcd", {"max_value": True})], "max_value = True ... bool"),
  ([Family("basic_arithmetic", {"allow_negation": 1})], "true or false"),
  ([Family("basic_arithmetic", {"operators": "+"})], "operators ... list"),
  ([Family("shortest_path", {"p_blocked": "x"})],
    "p_blocked ... finite number"),
  ([Family("shortest_path", {"p_blocked": math.nan})], "finite number"),
  ([Family("spell_backward", {"data_file": 3})], "data_file ... text"),
  ([Family("gcd", {"max_value": 0})], "max_value=0 is not valid: max_value"),
  ([Family("number_sequence", {"min_terms": 9, "max_complexity": 1})],
    "min_terms=9, max_complexity=1 is not valid: max_terms >= min_terms"),
  ([Family("number_sequence")], "max_complexity = 3 ... large"),
  ([Family("number_sequence", {"max_complexity": 4})], "max_complexity = 4"),
  ([Family("simple_equations", {"operators": ["+", "-"]})],
    "cannot generate a puzzle ... number of weights"),
  ([Family("string_synthesis"), Family("gcd"), Family("gcd", {})],
    "'gcd' ... 2 times"),
  ([Family("gcd", weight=-1)], "weights[0] = -1"),
  ([Family("gcd"), Family("lcm", weight=math.nan)], "weights[1] = nan"),
  ([Family("gcd", weight=0)], "add up to 0"),
  ([Family("number_filtering", {"min_numbers": 300, "max_numbers": 400})],
    "own answer does not pass: too long"),
])  # fmt: skip
def test_wrong_families_are_refused_in_one_line(families, named):
  with refuses(ValueError, named):
    check(families)


@pytest.mark.ci
def test_check_accepts_what_can_be_drawn():
  assert check(SMALL) is None and check(EVERY) is None
  assert check([Family("shortest_path", {"p_blocked": 0})]) is None


@pytest.mark.parametrize("split, index, seed, named", [
  ("test", 0, 0, "split = 'test'"), ("train", -1, 0, "index = -1"),
  ("train", 2**44, 0, "index = 17592186044416"), ("train", 0, -1, "seed = -1"),
])  # fmt: skip
def test_wrong_arguments_are_refused(split, index, seed, named):
  with pytest.raises(ValueError, match=named):
    puzzle(SMALL[3], split, index, seed=seed)
  with pytest.raises(ValueError, match="per_family = 0"):
    heldout(SMALL, per_family=0, seed=0)


def test_families_with_the_same_settings_share_a_dataset():
  a = Family("gcd", {"min_value": 1, "max_value": 9})
  b = Family("gcd", {"max_value": 9, "min_value": 1})
  assert (a, hash(a)) == (b, hash(b)) and gym._dataset(a) is gym._dataset(b)
  assert a != Family("gcd", {"max_value": 8, "min_value": 1})
