"""Tests of brorl_jax/verdicts/domains.py and of what each domain declares."""

import ast
import functools
import json
import pathlib
import re
import tomllib

import pytest
import tiers
from messages import refuses

from brorl_jax.configs import base
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import DEFAULTS, MADE
from brorl_jax.verdicts.domains import DOMAINS, OWN, verify
from brorl_jax.verdicts.pool import Job, Pool
from brorl_jax.verdicts.sandbox import jail
from brorl_jax.verdicts.sandbox.jail import Jail

VERIFIERS = {name: domain.verify for name, domain in DOMAINS.items()}
PUZZLE = gym.puzzle(gym.Family("gcd"), "train", 0, seed=0).entry
RIGHT = {
  "math": (r"so \boxed{\sqrt{8}}", {"answer": r"2\sqrt{2}"}),
  "code": ("```python\nprint(int(input()) + 1)\n```",
    {"tests": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}}),
  "stem": (r"\boxed{B}", {"answer": "B", "choices": ["helium", "neon"]}),
  "gym": (PUZZLE["answer"], PUZZLE),
  "instructions": ("no commas here",
    {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]}),
}  # fmt: skip
WRONG = {"math": (r"so \boxed{\sqrt{18}}", RIGHT["math"][1]),
  "code": ("```python\nprint(2)\n```", RIGHT["code"][1]),
  "stem": (r"\boxed{A}", RIGHT["stem"][1]), "gym": ("no", PUZZLE),
  "instructions": ("one, two", RIGHT["instructions"][1])}  # fmt: skip
FIELDS = {name: fields for name, (_, fields) in RIGHT.items()}
FIELDS["gym"] = {"entry": PUZZLE}
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def pool():
  inner = functools.partial(Jail, allow_inner=True)
  with Pool(VERIFIERS, workers=2, jail=inner) as pool:
    yield pool


def test_each_is_known_by_its_own_name():
  assert [*DOMAINS] == [*RIGHT] == [domain.name for domain in DOMAINS.values()]
  assert gym.DOMAIN.name == MADE


@pytest.mark.parametrize("domain", tiers.some(DOMAINS, 1))
def test_a_right_response_passes_and_a_wrong_one_fails(pool, domain):
  if domain == "code" and jail.measure().name == "none":
    pytest.skip(jail.measure().reason)
  right, wrong = pool.score([Job(domain, *x[domain]) for x in (RIGHT, WRONG)])
  assert right.verdict.status == "pass", right
  assert wrong.verdict.status == "fail", wrong
  share = 0.5 if domain == "code" else wrong.verdict.score
  assert right.verdict.score == 1.0 and wrong.verdict.score == share < 1.0


@pytest.mark.parametrize("domain", DOMAINS)
def test_what_follows_the_thinking_is_judged(domain):
  if domain == "code" and jail.measure().name == "none":
    pytest.skip(jail.measure().reason)
  parts = dict(right=f"\n{RIGHT[domain][0]}\n", wrong=f"\n{WRONG[domain][0]}\n")
  for line in (HERE / "thinking.jsonl").read_text().splitlines():
    case = json.loads(line)
    said = verify(domain, case["response"].format(**parts), **FIELDS[domain])
    assert said.status == case["want"], (case, said)


def test_only_the_extra_brings_the_puzzles_and_their_compiler():
  root = pathlib.Path(__file__).parents[2]
  base = (root / "requirements.txt").read_text().lower()
  lines = [line.partition("#")[0].strip() for line in base.splitlines()]
  names = {re.split(r"[<>=~\[ ;]", line)[0] for line in lines if line}
  assert "jax" in names and "mpmath" in names
  assert not names & {"reasoning-gym", "reasoning_gym", "pycosat", "sympy"}
  project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
  extra = project["optional-dependencies"]["gym"]
  assert extra == ["reasoning-gym==0.1.25", "sympy==1.14.0"]
  script = (root / "launch/environment.sh").read_text()
  assert '--editable "${root}[gym]"' in script


ROOT = pathlib.Path(__file__).parents[2]
# Mixtures and sets, which are those of domains.
DATA = "arithmetic presets public suite suite_puzzles suite_rows".split()
OUTSIDE = [path for folder in ("brorl_jax", "configs")
  for path in sorted((ROOT / folder).rglob("*.py"))
  if path.relative_to(ROOT).parts[1] not in ("verdicts",
    "data") and path.stem not in DATA]  # fmt: skip


def names_a_domain(source):
  names = {*DOMAINS, OWN.name}
  folders = {f"brorl_jax.verdicts.{name}" for name in DOMAINS}
  for node in ast.walk(ast.parse(source)):
    word, modules = None, []
    if isinstance(node, ast.Constant):
      word = node.value
    elif isinstance(node, ast.Attribute):
      of_domains = ast.unparse(node.value).endswith("domains")
      word = node.attr if of_domains else None
    elif isinstance(node, ast.ImportFrom):
      modules = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
      modules = [alias.name for alias in node.names]
    parts = {".".join(name.split(".")[:3]) for name in modules}
    if (isinstance(word, str) and word in names) or folders & parts:
      yield node.lineno


@pytest.mark.parametrize("path", tiers.some(OUTSIDE, 35), ids=str)
def test_no_file_outside_tasks_names_a_domain(path):
  assert [*names_a_domain(path.read_text())] == []


@pytest.mark.parametrize("line", [
  "x = 'gym'", "c.data.domains.math.weight = 0", "c.domains['own']",
  "from brorl_jax.verdicts import stem",
  "from brorl_jax.verdicts.gym.checks import value",
  "import brorl_jax.verdicts.code",
])  # fmt: skip
def test_a_name_is_seen(line):
  assert [*names_a_domain(line)] == [1]


def test_words_that_only_hold_a_name_are_none():
  text = "import math\nx.code\n'the gym'\nfrom brorl_jax.verdicts import own\n"
  assert [*names_a_domain(text)] == []


def test_every_domain_has_its_defaults_in_a_config():
  said = base.get_config().data.domains
  assert {*said} == {*DEFAULTS} == {*DOMAINS, OWN.name}
  scored = {name for name, one in said.items() if one.reward == "score"}
  assert scored == {"code", "instructions", "own"}
  assert "\\boxed{}" in said.math.instruction


_PAIRS = [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "7\n"}]


@pytest.mark.parametrize("domain", ["math", "stem", "gym", "instructions"])
def test_it_is_the_verdict_of_the_domain(domain):
  for cases, status in ((RIGHT, "pass"), (WRONG, "fail")):
    response, fields = cases[domain]
    fields = {"entry": fields} if domain == "gym" else fields
    assert verify(domain, response, **fields).status == status


def test_programs_are_judged_where_there_is_a_jail():
  verdict = verify(
    "code", "```\nprint(int(input()) + 1)\n```", tests=_PAIRS, time_limit=2
  )
  if verdict.status != "invalid":  # else this machine has none
    assert (verdict.status, verdict.score) == ("fail", 0.5)


def test_a_verifier_that_fails_says_nothing_of_the_response(monkeypatch):
  def broken(*_, **__):
    raise jail.Failed("no jail")

  monkeypatch.setattr(jail.Jail, "ask", broken)
  monkeypatch.setattr(jail.Jail, "run", broken)
  for verdict in (verify("code", "```\nprint(1)\n```", tests=_PAIRS),
    verify("math", r"\boxed{(x+1)^2}", answer="x^2+2x+1")):  # fmt: skip
    assert (verdict.status, verdict.score) == ("invalid", 0.0)
    assert "no jail" in verdict.reason


@pytest.mark.parametrize("domain, fields, message", [
  ("maths", {"answer": "1"}, "'maths' ... domain"), ("x", {}, "'x' ... domain"),
  ("math", {}, "'answer' ... missing"),
  ("stem", {"answer": "1", "choice": []}, "'choice' ... unknown"),
  ("math", {"answer": 0.5}, "0.5 ... answer ... text"),
  ("math", {"answer": ""}, "answer: empty; "),
])  # fmt: skip
def test_what_cannot_be_judged_is_refused(domain, fields, message):
  with refuses(ValueError, message):
    verify(domain, "1", **fields)
