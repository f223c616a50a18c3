"""The small files of configs/data, from which every domain trains."""

import contextlib
import io
import json
import pathlib
import sys

import pytest

from brorl_jax.data import dataset
from brorl_jax.verdicts import domains

FOLDER = pathlib.Path(__file__).parents[2] / "configs/data"
DOMAINS = ("math", "code", "stem", "instructions")

# One right program for each task, in the order of the file.
STDIN = """
print(sum(map(int, input().split())))
---
print(int(input()) ** 2)
---
print(input()[::-1])
---
for i in range(int(input())): print(i + 1)
---
print(max(map(int, input().split())))
---
print(len(input().split()))
---
print("odd" if int(input()) % 2 else "even")
---
print(input().upper())
---
print(*sorted(map(int, input().split())))
---
print(sum(int(input()) for _ in range(int(input()))))
---
print(sum(c in "aeiou" for c in input()))
---
import math; print(math.gcd(*map(int, input().split())))
---
import math; print(math.factorial(int(input())))
---
w = input(); print("yes" if w == w[::-1] else "no")
---
for i in range(int(input())): print("*" * (i + 1))
""".split("---\n")
CALLED = {
  "add": lambda a, b: a + b,
  "is_even": lambda n: n % 2 == 0,
  "largest": max,
  "reverse": lambda text: text[::-1],
  "total": sum,
  "evens": lambda numbers: [n for n in numbers if n % 2 == 0],
  "count": str.count,
  "squares": lambda n: [i * i for i in range(1, n + 1)],
  "clamp": lambda x, low, high: max(low, min(x, high)),
  "unique": lambda items: list(dict.fromkeys(items)),
  "fibonacci": lambda n: round(((1 + 5**0.5) / 2) ** n / 5**0.5),
  "is_prime": lambda n: n > 1 and all(n % d for d in range(2, n)),
  "initials": lambda name: "".join(w[0].upper() for w in name.split()),
  "merge": lambda a, b: sorted(a + b),
  "digits": lambda n: sum(map(int, str(n))),
  "longest": lambda words: max(words, key=len),
  "transpose": lambda rows: [
    list(column) for column in zip(*rows, strict=True)
  ],
}


def rows(domain):
  text = (FOLDER / f"{domain}.jsonl").read_text("utf-8")
  return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_files_are_small_and_plain(domain):
  examples = rows(domain)
  assert 30 <= len(examples) <= 60
  assert [e["id"] for e in examples] == [
    f"{domain}-{n:03d}" for n in range(1, len(examples) + 1)
  ]
  assert all(len(e["prompt"]) < 200 for e in examples)
  assert len({e["prompt"] for e in examples}) == len(examples)


def test_every_verifier_takes_its_golds():
  data = dataset.read(str(FOLDER / "*.jsonl"), domains=domains.DOMAINS)
  assert ({e.domain for e in data.examples}, data.repeats) == (set(DOMAINS), 0)
  # Enough to train on and something to hold out, in every domain.
  for domain in DOMAINS:
    train, held = dataset.split(
      dataset.read(str(FOLDER / f"{domain}.jsonl"), domains=domains.DOMAINS),
      one_in=5,
    )
    assert len(train.examples) >= 20 and len(held.examples) >= 3


def test_every_task_has_a_program(monkeypatch):
  examples = rows("code")
  stdin = [e["tests"] for e in examples if "fn_name" not in e["tests"]]
  called = [e["tests"] for e in examples if "fn_name" in e["tests"]]
  assert len(stdin) == len(STDIN)
  for program, tests in zip(STDIN, stdin, strict=True):
    assert len(tests["inputs"]) >= 3
    for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
      monkeypatch.setattr(sys, "stdin", io.StringIO(given))
      out = io.StringIO()
      with contextlib.redirect_stdout(out):
        exec(program, {})
      assert out.getvalue() == expected, program
  assert [t["fn_name"] for t in called] == list(CALLED)
  for tests in called:
    assert len(tests["inputs"]) >= 3
    for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
      result = CALLED[tests["fn_name"]](*given)
      assert (result, type(result)) == (expected, type(expected)), tests


def test_no_test_is_passed_by_a_constant():
  for example in rows("code"):
    outputs = [json.dumps(o) for o in example["tests"]["outputs"]]
    assert len(set(outputs)) >= 2, example["prompt"]


def test_a_function_is_named_in_its_prompt():
  for example in rows("code"):
    assert example["tests"].get("fn_name", "") in example["prompt"]
