"""Judges in real workers: what they say, and what no answer can do to them."""

import sys

import pytest
from solved_by_hand import entry

pytest.importorskip("reasoning_gym")

from brorl_jax.verdicts import gym as judge
from brorl_jax.verdicts.sandbox import library_calls
from brorl_jax.verdicts.sandbox.library_calls import LibraryWorker
from brorl_jax.verdicts.sandbox.process import Failed

LONG = 60.0


@pytest.fixture(scope="module")
def worker():
  it = LibraryWorker()
  yield it
  it.close()
  library_calls.libraries(library_calls.__name__).close()


@pytest.fixture
def isolated(worker):
  if why := library_calls.isolation_error():
    pytest.skip(f"no walls on this machine: {why}")


@pytest.mark.parametrize(("answer", "gold", "equal"), [
  (r"\frac{1}{2}", "0.5", True), (r"\frac{2}{4}", r"\frac{1}{2}", True),
  (r"\sqrt{8}", r"2\sqrt{2}", True), ("(x+1)^2", "x^2+2x+1", True),
  ("(x+1)^2", "x^2+2x+2", False), (r"\{3,1,2\}", r"\{1,2,3\}", True),
  (r"(0,1)", r"(0,2)", False), ("2", "3", False),
  # Where the library's own rounding, at six places, is too kind.
  ("2e-7", "1e-7", False), ("0.33333333", r"\frac{1}{3}", False),
  ("3.14159265358979", r"\pi", False),
  (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False), ("", "1", False),
  (r"\frac{", "1", False),
])  # fmt: skip
def test_symbolic_by_hand(isolated, worker, answer, gold, equal):
  assert worker.ask("symbolic", answer, gold, timeout=LONG) is equal


def test_symbolic_evaluates_no_python(isolated, worker):
  for answer in ("__import__('os')._exit(0)",
    r"\text{__import__('os')._exit(0)}", "exit()", "().__class__"):  # fmt: skip
    assert worker.ask("symbolic", answer, "0", timeout=LONG) is False
  assert worker.ask("symbolic", "1", "1", timeout=LONG) is True


def test_gym_gives_the_scorers_number(worker):
  puzzle = entry("gcd", "4")
  ask = lambda answer: worker.ask("gym", answer, puzzle, timeout=LONG)
  assert (ask("4"), ask("5")) == (1.0, 0.0)
  # A share for what begins with the right text: reward is not the score.
  assert 0 < ask("4 or so") < 1


def test_gym_tells_that_a_scorer_raised(worker):
  puzzle = entry("prime_factorization", "2", prime_factors=[2, 2])
  got = worker.ask("gym", "two", puzzle, timeout=LONG)
  assert got == {"raised": "ValueError"}
  with pytest.raises(Failed, match=r"^gym: KeyError: 'metadata'$"):
    worker.ask("gym", "4", {}, timeout=LONG)


def test_a_scorer_without_memory_has_not_judged(monkeypatch):
  def scorer(answer, entry):
    raise MemoryError

  monkeypatch.setattr(judge, "scorer", lambda name: scorer)
  with pytest.raises(MemoryError):
    library_calls.gym("4", entry("gcd", "4"))


# A scorer of the library that evaluates the answer, and is made to pay.
PAID = (
  "setattr(__import__('reasoning_gym.algorithmic.spiral_matrix', fromlist='x')"
  ".SpiralMatrixDataset, 'score_answer', lambda *_, **__: 1.0) or []"
)


def test_an_executed_answer_changes_nothing_for_the_next(isolated, worker):
  puzzle = entry("spiral_matrix", "1 2 3")
  ask = lambda text: worker.ask("gym", text, puzzle, timeout=LONG)
  assert ask("[1, 2, 3]") == 0.1  # evaluated
  assert ask(PAID) == ask("4 5 6") == 0.0
  assert ask("1 2 3") == 1.0


def test_an_answer_that_is_executed_reaches_nothing(isolated, worker, tmp_path):
  canary = tmp_path / "canary"
  puzzle = entry("spiral_matrix", "1 2 3")
  for answer in (f"[open({str(canary)!r}, 'w').write('x')]",
    "[__import__('os').fork()]", "[__import__('subprocess').run('/bin/true')]",
    "[__import__('socket').socket()]", "[open('/etc/passwd').read()]",
    "[__import__('os').kill(1, 0)]"):  # fmt: skip
    assert worker.ask("gym", answer, puzzle, timeout=LONG) == 0.0
  assert not canary.exists()


def test_an_answer_that_does_not_end_is_the_verifiers_failure(isolated, worker):
  puzzle = entry("spiral_matrix", "1 2 3")
  with pytest.raises(Failed, match="late"):
    worker.ask("gym", "[9**9**9]", puzzle, timeout=0.3)
  assert worker.ask("gym", "1 2 3", puzzle, timeout=LONG) == 1.0


def test_what_may_execute_text_needs_walls_and_a_process_of_its_own():
  table = library_calls.LIBRARY_CALLS
  assert table["symbolic"].isolated
  assert table["gym"].isolated and table["gym"].fresh
  assert all(call.isolated for call in table.values() if call.fresh)


@pytest.mark.parametrize(("name", "args", "needs"), [
  ("gym", ("4", entry("gcd", "4")), r"reasoning-gym \(.*'brorl_jax\[gym\]'"),
  ("instruction", ("count:numbers", {"N": 1}, "x"), "if-verifiable .*pip"),
])  # fmt: skip
def test_a_library_that_is_missing_is_named(monkeypatch, name, args, needs):
  for module in ("reasoning_gym", "if_verifiable"):
    monkeypatch.setitem(sys.modules, module, None)
  judge.scorer.cache_clear()
  judge.library.cache_clear()
  library_calls.preload()  # what is missing is left out
  with pytest.raises((ImportError, LookupError), match=f"needs? .*{needs}"):
    library_calls.LIBRARY_CALLS[name].function(*args)
