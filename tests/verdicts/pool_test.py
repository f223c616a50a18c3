"""The pool: order, copies, failures, deadlines, and what it leaves behind."""

import contextlib
import os
import random
import threading
import time

import messages
import pytest

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.pool import Job, Pool
from brorl_jax.verdicts.sandbox.jail import Failed, Jail

TABLE = "library_calls_for_tests"
SOON = 0.3  # seconds, of a deadline that is meant to be missed


def jailed() -> Jail:
  return Jail(TABLE)


def right(response, entry, jail):
  ok = response == entry["gold"]
  return Verdict(*(("pass", 1.0, "") if ok else ("fail", 0.0, "no")), response)


def asked(response, entry, jail):
  """What the jail says of a judge and its arguments."""
  judge, *args = entry["ask"]
  value = jail.ask(judge, *args, timeout=entry.get("timeout", 60.0))
  ok = value == entry["gold"]
  return Verdict(*(("pass", 1.0, "") if ok else ("fail", 0.0, "no")), response)


@pytest.fixture
def pool():
  verifiers = {"right": right, "asked": asked}
  with Pool(verifiers, workers=2, deadline_s=60.0, jail=jailed) as it:
    yield it


def test_verdicts_come_in_the_order_of_the_jobs(pool):
  golds = [{"gold": str(i)} for i in range(10)]
  jobs = [Job("right", str(i % 7), golds[i % 10]) for i in range(200)]
  judged = pool.score(jobs)
  assert [one.verdict.reward for one in judged] == [
    float(i % 7 == i % 10) for i in range(200)
  ]
  assert [one.verdict.answer for one in judged] == [j.response for j in jobs]
  assert all(0 <= one.seconds < 60 for one in judged)
  assert pool.score([]) == []


def test_equal_jobs_are_judged_once():
  seen = []

  def verify(response, entry, jail):
    seen.append((response, entry["gold"]))
    return right(response, entry, jail)

  first, equal, other = {"gold": "a"}, {"gold": "a"}, {"gold": "b"}
  jobs = [Job(domain, response, entry) for domain in ("x", "y")
    for entry in (first, equal, other) for response in "aabab"]  # fmt: skip
  with Pool({"x": verify, "y": verify}, workers=2, jail=jailed) as pool:
    judged = pool.score(jobs)
  # Two responses to three objects in two domains.
  assert len(seen) == 12
  assert sorted(set(seen)) == [(r, g) for r in "ab" for g in "ab"]
  assert [j.verdict.reward for j in judged[:5]] == [1, 1, 0, 1, 0]
  assert [j.verdict.reward for j in judged[10:15]] == [0, 0, 1, 0, 1]
  assert judged[0] is judged[1] and judged[0] is not judged[5]


def test_equal_parts_are_judged_once():
  seen = []
  parts = {"x": lambda response, entry: response.strip(entry["gold"])}
  verify = lambda *args: seen.append(args[0]) or right(*args)
  gold = {"gold": "a"}
  jobs = [Job(d, r, gold) for d in ("x", "y") for r in ("a", "ba", "b", "c")]
  with Pool({"x": verify, "y": verify}, parts=parts, jail=jailed) as pool:
    judged = pool.score(jobs)
  assert sorted(seen) == ["a", "a", "b", "b", "ba", "c", "c"]
  assert judged[1] is judged[2] and judged[5] is not judged[6]


@pytest.mark.parametrize(("error", "reason"), [
  (ValueError("a\nb"), "ValueError: a b"), (KeyError("a"), "KeyError: 'a'"),
  (RecursionError(), "RecursionError:"), (SystemExit(0), "SystemExit: 0"),
  (KeyboardInterrupt(), "KeyboardInterrupt:"),
  (None, "it returned a NoneType, not a Verdict"),
])  # fmt: skip
def test_a_verifier_that_fails_is_neither_right_nor_wrong(error, reason):
  def verify(response, entry, jail):
    if response != "bad":
      return right(response, entry, jail)
    if error is not None:
      raise error
    return None

  gold = {"gold": "a"}
  jobs = [Job("x", response, gold) for response in ("a", "bad", "b", "bad")]
  with Pool({"x": verify}, workers=2, jail=jailed) as pool:
    judged = [one.verdict for one in pool.score(jobs)]
  assert [v.status for v in judged] == ["pass", "invalid", "fail", "invalid"]
  assert judged[1] == Verdict("invalid", 0.0, f"verifier failed: {reason}", "")
  assert judged[1].code == "verifier failed"
  assert not pool.replaced()


def test_a_process_that_ended_is_named_and_not_by_the_answer_s_own_reason():
  def verify(response, entry, jail):
    with contextlib.suppress(Failed):
      jail.ask("crash", 0)
    return right(response, entry, jail)

  jobs = [Job("x", response, {"gold": "a"}) for response in "ab"]
  with Pool({"x": verify}, workers=1, jail=jailed) as pool:
    assert [one.verdict.status for one in pool.score(jobs)] == ["pass", "fail"]
    assert pool.replaced() == {"its process ended": 2}


@pytest.mark.ci
def test_a_random_mix_has_no_wrong_verdict(pool):
  rng = random.Random(0)
  kinds = {
    "pass": [("echo", "a")], "fail": [("echo", "b"), ("length", "abc")],
    "invalid": [("crash", 0), ("segfault",), ("leave",), ("recurse",),
      ("huge", 70_000), ("say", "0200000031320000"), ("unserialisable",),
      ("sleep",), ("spin",)],
  }  # fmt: skip
  wanted, jobs = [], []
  for i in range(100):
    status = rng.choices(list(kinds), (6, 6, 3))[0]
    ask = rng.choice(kinds[status])
    late = ask[0] in ("sleep", "spin")
    entry = {"ask": ask, "gold": ["a"], **({"timeout": 0.05} if late else {})}
    wanted.append(status)
    jobs.append(Job("asked", str(i), entry))
  assert [one.verdict.status for one in pool.score(jobs)] == wanted
  failed = wanted.count("invalid")
  assert failed > 10
  assert pool.replaced().total() == failed and not pool.replaced()


def test_what_is_judged_for_too_long_is_invalid_and_all_else_is_judged():
  jobs = [
    Job("asked", "a", {"ask": ("pid",), "gold": 0}),
    Job("asked", "b", {"ask": ("sleep",), "gold": None}),
    Job("asked", "c", {"ask": ("spin",), "gold": None}),
    Job("asked", "d", {"ask": ("echo",), "gold": []}),
  ]
  late = f"late: no verdict in {SOON} s"
  with Pool({"asked": asked}, workers=1, deadline_s=SOON, jail=jailed) as pool:
    jailed().ask("echo")  # the zygote is there, if no worker
    judged = pool.score(jobs)
    status = [one.verdict.status for one in judged]
    assert status == ["fail", "invalid", "invalid", "pass"]
    assert [one.verdict.reason for one in judged[1:3]] == [late] * 2
    assert all(SOON <= one.seconds < 60 for one in judged[1:3])
    assert pool.replaced() == {late: 2} and not pool.replaced()


@pytest.mark.ci
def test_to_wait_for_others_is_no_fault():
  """One worker, and a queue that takes many times as long as the deadline."""

  def verify(response, entry, jail):
    time.sleep(0.4 * SOON)
    return right(response, entry, jail)

  jobs = [Job("x", str(i), {"gold": str(i)}) for i in range(7)]
  with Pool({"x": verify}, workers=1, deadline_s=SOON, jail=jailed) as pool:
    begin = time.monotonic()
    assert all(one.verdict.reward for one in pool.score(jobs))
    assert time.monotonic() - begin > 2.5 * SOON
    assert not pool.replaced()


def test_a_verifier_that_hangs_in_this_process_costs_its_thread():
  release, ended = threading.Event(), threading.Event()

  def verify(response, entry, jail):
    if response == "hang":
      release.wait()
      ended.set()
    return right(response, entry, jail)

  gold = {"gold": "a"}
  jobs = [Job("x", response, gold) for response in ("hang", "a", "b")]
  with Pool({"x": verify}, workers=1, deadline_s=SOON, jail=jailed) as pool:
    before = threading.active_count()
    judged = [one.verdict.status for one in pool.score(jobs)]
    assert judged == ["invalid", "pass", "fail"]
    assert threading.active_count() == before + 1
    found = [one.verdict.status for one in pool.score(jobs[1:])]
    assert found == ["pass", "fail"]
    release.set()
    assert ended.wait(30)
    for _ in range(500):
      if threading.active_count() == before:
        break
      time.sleep(0.01)
    assert threading.active_count() == before
    # Its late answer is dropped.
    found = [one.verdict.status for one in pool.score(jobs)]
    assert found == ["fail", "pass", "fail"]


def test_callers_wait_and_threads_are_no_more_than_workers():
  lock, running, most = threading.Lock(), 0, 0

  def verify(response, entry, jail):
    nonlocal running, most
    with lock:
      running += 1
      most = max(most, running)
    time.sleep(0.001)
    with lock:
      running -= 1
    return right(response, entry, jail)

  found = {}

  def call(number):
    gold = {"gold": f"{number}/7"}
    jobs = [Job("x", f"{number}/{i}", gold) for i in range(9)]
    found[number] = [one.verdict.reward for one in pool.score(jobs)]

  with Pool({"x": verify}, workers=3, jail=jailed) as pool:
    callers = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for caller in callers:
      caller.start()
    for caller in callers:
      caller.join()
  assert found == {i: [0.0] * 7 + [1.0, 0.0] for i in range(6)}
  assert most == 3


def test_a_closed_pool_leaves_nothing_and_refuses():
  jailed().ask("echo")  # the template stays
  threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
  pool = Pool({"asked": asked}, workers=3, jail=jailed)
  entry = {"ask": ("echo",), "gold": []}
  jobs = [Job("asked", str(i), entry) for i in range(50)]
  assert all(one.verdict.reward for one in pool.score(jobs))
  pool.close()
  pool.close()
  assert threading.active_count() == threads
  assert len(os.listdir("/proc/self/fd")) == fds
  with pytest.raises(ValueError, match=r"^the pool is closed; make a new one$"):
    pool.score(jobs)


def test_closing_ends_what_is_being_judged():
  pool = Pool({"asked": asked}, workers=2, jail=jailed)
  sleep = {"ask": ("sleep",), "gold": None}
  found = []
  jobs = [Job("asked", str(i), sleep) for i in range(3)]
  caller = threading.Thread(target=lambda: found.extend(pool.score(jobs)))
  caller.start()
  time.sleep(0.3)
  pool.close()
  caller.join(30)
  assert [one.verdict.code for one in found] == ["late"] * 3


def test_an_interrupted_call_leaves_a_pool_that_works(pool):
  with messages.interrupted(0.2):
    pool.score([Job("asked", "a", {"ask": ("sleep",), "gold": None})])
  (one,) = pool.score([Job("right", "a", {"gold": "a"})])
  assert one.verdict.reward == 1.0


@pytest.mark.parametrize(
  ("cpus", "threads"), [(1, 2), (2, 2), (4, 4), (5, 4), (96, 95)]
)
def test_there_are_as_many_threads_as_cpus_can_use(monkeypatch, cpus, threads):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus))
  with Pool({}, jail=jailed) as pool:
    assert len(pool._threads) == threads
