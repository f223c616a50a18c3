"""Rows of public sets as records of brorl_jax/data/dataset.py.

  python -m brorl_jax.main --mode=prepare --set=deepscaler,eurus2 --workdir=data

A function takes a row of its set, as published, and returns a record. For a row
without an example it raises ValueError, in the same words for the same reason.
A config may name one too: --config.data.fields=brorl_jax.configs.public:eurus2.
What is read of each set:

  deepscaler         problem, answer. (solution is not read.)
  eurus2             prompt, ability, data_source, and of reward_model
                     ground_truth: the tests as JSON text, {"inputs": [...],
                     "outputs": [...]} and "fn_name" for a function, whose
                     inputs are one argument a line, as JSON, and whose outputs
                     are JSON. If all the outputs are lists of one, results are
                     what is in them. The system message is dropped: it asks for
                     the action tags of the model that the set was made with.
                     Rows of mathematics are left out: ProRL takes the code of
                     this set, and DeepScaleR's mathematics.
  eurus2_math        The rows of mathematics alone.
  scp116k            problem, domain, and the first there is of
                     extracted_solution, matched_solution, solution; see
                     `scp116k` for what of it is an answer.
  llama_nemotron_if  input (messages), and of args instruction_id_list and
                     instruction_kwargs. (system_prompt is not read.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from brorl_jax.verdicts import math, stem

_SHORT = 100  # characters of a solution that may itself be the answer
# A solution of one sentence that ends in its only value.
_ENDS = re.compile(r"[^=,;\n]*=(?:[^=,;\n]*=)*(?P<value>[^=;\n]*)")
_ENDS_WORDS = re.compile(r"\b(?:and|or|so|but|where|with|if|to|not)\b")
_SEVERAL_OR_NONE = re.compile(
  r"[.!?]\s|\b(?:not|never|cannot|no)\b|n't\b", re.I
)
_COMMAND = re.compile(
  r"\\(?:text|mathrm|operatorname|mathbf)\s*\{[\w ]*\}|\\[A-Za-z]+"
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")
# Words of which no name of a thing consists: those of sentences and of remarks.
_NO_NAME = frozenset(
  """
  a am an and are as at be because been but by can cannot could decreases
  depends did do does doubles equals exists false for from gives given had has
  have hence holds how if in increases is it its left may must n/a na no none
  not obvious omitted on or problem proof proved proven qed remains same see
  shown since so solution solved text that then there therefore these they this
  those thus to trivial true us was we were what when where which will with
  would yes you
  """.split()
)
_NAME = re.compile(r"[^\W\d_][\w'+-]*(?:[ -][\w'+-]+){0,3}")


def deepscaler(row: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "domain": "math",
    "source": "deepscaler",
    "prompt": _text(row, "problem"),
    "answer": _text(row, "answer"),
  }


def eurus2(row: Mapping[str, Any]) -> dict[str, Any]:
  if row.get("ability") == "math":
    raise ValueError("mathematics, which is eurus2_math")
  if row.get("ability") != "code":
    raise ValueError("ability is neither math nor code")
  return {**_asked(row, "code"), "tests": _tests(_truth(row))}


def eurus2_math(row: Mapping[str, Any]) -> dict[str, Any]:
  if row.get("ability") != "math":
    raise ValueError("ability is not math")
  return {**_asked(row, "math"), "answer": _truth(row)}


def _asked(row: Mapping[str, Any], domain: str) -> dict[str, Any]:
  return {
    "domain": domain,
    "source": f"eurus2-{_slug(row.get('data_source'))}",
    "messages": [m for m in _messages(row, "prompt") if m["role"] != "system"],
  }


def _truth(row: Mapping[str, Any]) -> str:
  if not isinstance(model := row.get("reward_model"), dict):
    raise ValueError("no reward_model")
  return _text(model, "ground_truth")


def _tests(truth: str) -> dict[str, Any]:
  try:
    tests = json.loads(truth)
  except (ValueError, RecursionError):
    raise ValueError("the tests are not JSON") from None
  lists = isinstance(tests, dict) and all(
    isinstance(tests.get(k), list) for k in ("inputs", "outputs")
  )
  if not lists:
    raise ValueError("the tests have no lists of inputs and outputs")
  inputs, outputs = tests["inputs"], tests["outputs"]
  if not all(isinstance(text, str) for text in (*inputs, *outputs)):
    raise ValueError("a test is not text")
  name = tests.get("fn_name")
  if name is None:
    return {"inputs": inputs, "outputs": outputs}
  try:
    calls = [[json.loads(line) for line in t.split("\n")] for t in inputs]
    results = [json.loads(text) for text in outputs]
  except (ValueError, RecursionError):
    raise ValueError(
      "an argument or result of a function is not JSON"
    ) from None
  if all(isinstance(r, list) and len(r) == 1 for r in results):
    results = [r[0] for r in results]
  return {"inputs": calls, "outputs": results, "fn_name": name}


def scp116k(row: Mapping[str, Any]) -> dict[str, Any]:
  r"""The answer is a value, which the verifier can compare, never a sentence.

  It is the last \boxed{} of the solution; or the whole solution, if that is one
  line; or what follows the last "=" of a sentence that ends in a number with
  its unit and has no other: "The decay constant gives t = 6.93 h." A value is a
  number with its unit, a formula that `math` reads, a chemical formula, or a
  name of at most four words.
  """
  names = ("extracted_solution", "matched_solution", "solution")
  given = [row[n] for n in names if isinstance(row.get(n), str)]
  solution = next((text.strip() for text in given if text.strip()), None)
  if solution is None:
    raise ValueError("no solution")
  record = {
    "domain": "stem",
    "source": f"scp116k-{_slug(row.get('domain'))}",
    "prompt": _text(row, "problem"),
  }
  if (box := _boxed(solution)) is not None:
    if not _is_value(box):
      raise ValueError("the box holds no value")
    return {**record, "answer": box}
  if "\n" in solution or len(solution) > _SHORT:
    raise ValueError("no box in a long solution")
  if _is_value(line := solution.rstrip(". ")):
    return {**record, "answer": line}
  if (value := _last_value(line)) is None:
    raise ValueError("a sentence")
  return {**record, "answer": value}


def _is_value(text: str) -> bool:
  text = text.strip()
  bare = stem.unwrapped(text)
  if not bare or len(text) > stem.MAX_GOLD:
    return False
  quantity = stem.read_quantity(text)
  if quantity is not None and quantity.known:
    return True
  if all(map(stem.is_formula, bare.split())):
    return True
  if _NAME.fullmatch(bare):
    return _NO_NAME.isdisjoint(re.findall(r"[\w/']+", bare.lower()))
  words = _COMMAND.sub(" ", text)
  if _LONG_WORD.search(words) or _NO_NAME & {*_WORD.findall(words.lower())}:
    return False
  try:
    math.check_reference(text)
  except ValueError:
    return False
  return True


def _last_value(sentence: str) -> str | None:
  """The quantity at the end of a sentence with one equation."""
  found = _ENDS.fullmatch(sentence)
  if found is None or _SEVERAL_OR_NONE.search(sentence):
    return None
  value = found["value"].strip(" $")
  equation = sentence[sentence.index("=") :]
  quantity = stem.read_quantity(value)
  if quantity is None or not quantity.known or _ENDS_WORDS.search(equation):
    return None
  return value


def _boxed(text: str) -> str | None:
  """What the last box holds, its braces paired; None if there is no box."""
  start = text.rfind("\\boxed{")
  if start < 0:
    return None
  start += len("\\boxed{")
  depth = 1
  for i in range(start, len(text)):
    depth += {"{": 1, "}": -1}.get(text[i], 0)
    if depth == 0:
      return text[start:i].strip()
  return None


def llama_nemotron_if(row: Mapping[str, Any]) -> dict[str, Any]:
  args = row.get("args")
  if not isinstance(args, dict):
    raise ValueError("no args")
  ids = args.get("instruction_id_list")
  kwargs = args.get("instruction_kwargs")
  if not isinstance(ids, list) or not isinstance(kwargs, list):
    raise ValueError("no instruction_id_list and instruction_kwargs")
  if not ids or len(ids) != len(kwargs):
    raise ValueError("instructions and their arguments differ in number")
  if not all(isinstance(kw, dict) or kw is None for kw in kwargs):
    raise ValueError("the arguments of an instruction are no object")
  return {
    "domain": "instructions",
    "source": "llama_nemotron_if",
    "messages": _messages(row, "input"),
    "instructions": [
      # Some exports name every argument of every instruction, as null.
      {
        "id": i,
        "kwargs": {k: v for k, v in (kw or {}).items() if v is not None},
      }
      for i, kw in zip(ids, kwargs, strict=True)
    ],
  }


def _messages(row: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
  messages = row.get(field)
  if not isinstance(messages, list) or not messages:
    raise ValueError(f"no {field}")
  if not all(isinstance(m, dict) for m in messages):
    raise ValueError(f"{field} is no list of messages")
  return [
    {"role": m.get("role"), "content": _unix(m.get("content"))}
    for m in messages
  ]


def _text(row: Mapping[str, Any], field: str) -> str:
  value = row.get(field)
  if isinstance(value, int) and not isinstance(value, bool):
    value = str(value)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"no {field}")
  return _unix(value)


def _unix(value: Any) -> Any:
  return value.replace("\r\n", "\n") if isinstance(value, str) else value


def _slug(value: Any) -> str:
  slug = re.sub(r"[^a-z0-9_]+", "-", str(value or "other").lower()).strip("-")
  return slug[:64] or "other"


class PublicSet(NamedTuple):
  """Where a set is, as an entry of data.files, and what makes records of it."""

  place: str
  record: Callable[[Mapping[str, Any]], dict[str, Any]]
  rows: int  # about; as its card or paper says
  licence: str


SETS = {
  "deepscaler": PublicSet(
    "hub:agentica-org/DeepScaleR-Preview-Dataset:deepscaler",
    deepscaler,
    40_315,
    "MIT",
  ),
  "eurus2": PublicSet(
    "hub:PRIME-RL/Eurus-2-RL-Data:train", eurus2, 480_537, "MIT"
  ),
  "eurus2_math": PublicSet(
    "hub:PRIME-RL/Eurus-2-RL-Data:train", eurus2_math, 480_537, "MIT"
  ),
  "scp116k": PublicSet(
    "hub:EricLu/SCP-116K", scp116k, 116_756, "CC-BY-NC-SA-4.0"
  ),
  "llama_nemotron_if": PublicSet(
    "hub:nvidia/Llama-Nemotron-Post-Training-Dataset:RL/instruction_following",
    llama_nemotron_if,
    56_339,
    "CC-BY-4.0",
  ),
}
