"""Rows of the recipe's public sets as records of `dataset`.

What is read of each set:

  deepscaler         agentica-org/DeepScaleR-Preview-Dataset, deepscaler.json:
                     problem, answer. (solution is not read.)
  eurus2             PRIME-RL/Eurus-2-RL-Data, train.parquet: prompt,
                     ability ("math" or "code"), data_source, and of
                     reward_model ground_truth: the answer, or the tests as
                     JSON text, {"inputs": [...], "outputs": [...]} and
                     "fn_name" for a function, whose inputs are one argument
                     a line, as JSON, and whose outputs are JSON. If all the
                     outputs are lists of one, results are what is in them.
                     The system message is dropped: it asks for the action
                     tags of the model that the set was made with.
  scp116k            EricLu/SCP-116K: problem, domain, and the first there is
                     of extracted_solution, matched_solution, solution. The
                     answer is the last \\boxed{} in it, or the whole of it if
                     it is one line of at most 100 characters.
  llama_nemotron_if  nvidia/Llama-Nemotron-Post-Training-Dataset,
                     RL/instruction_following/*.jsonl: input (messages), and
                     of args instruction_id_list and instruction_kwargs. (The
                     column system_prompt is not read.)

Fields that are not named are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_SHORT = 100  # characters of a solution that may itself be the answer


class Unusable(ValueError):
  """Why a row has no example in it; the same words for the same reason."""


def _deepscaler(row: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "domain": "math",
    "source": "deepscaler",
    "prompt": _text(row, "problem"),
    "answer": _text(row, "answer"),
  }


def _eurus2(row: Mapping[str, Any]) -> dict[str, Any]:
  model = row.get("reward_model")
  if not isinstance(model, dict):
    raise Unusable("no reward_model")
  truth = _text(model, "ground_truth")
  example = {
    "domain": row.get("ability"),
    "source": f"eurus2-{_slug(row.get('data_source'))}",
    "messages": [m for m in _messages(row, "prompt") if m["role"] != "system"],
  }
  if example["domain"] == "math":
    return {**example, "answer": truth}
  if example["domain"] == "code":
    return {**example, "tests": _eurus2_tests(truth)}
  raise Unusable("ability is neither math nor code")


def _eurus2_tests(truth: str) -> dict[str, Any]:
  try:
    tests = json.loads(truth)
  except (ValueError, RecursionError):
    raise Unusable("the tests are not JSON") from None
  lists = isinstance(tests, dict) and all(
    isinstance(tests.get(k), list) for k in ("inputs", "outputs")
  )
  if not lists:
    raise Unusable("the tests have no lists of inputs and outputs")
  inputs, outputs = tests["inputs"], tests["outputs"]
  if not all(isinstance(text, str) for text in (*inputs, *outputs)):
    raise Unusable("a test is not text")
  name = tests.get("fn_name")
  if name is None:
    return {"inputs": inputs, "outputs": outputs}
  try:
    calls = [[json.loads(line) for line in t.split("\n")] for t in inputs]
    results = [json.loads(text) for text in outputs]
  except (ValueError, RecursionError):
    raise Unusable("an argument or result of a function is not JSON") from None
  if all(isinstance(r, list) and len(r) == 1 for r in results):
    results = [r[0] for r in results]
  return {"inputs": calls, "outputs": results, "fn_name": name}


def _scp116k(row: Mapping[str, Any]) -> dict[str, Any]:
  names = ("extracted_solution", "matched_solution", "solution")
  given = [row[n] for n in names if isinstance(row.get(n), str)]
  solution = next((text.strip() for text in given if text.strip()), None)
  if solution is None:
    raise Unusable("no solution")
  answer = _boxed(solution)
  if answer is None and len(solution) <= _SHORT and "\n" not in solution:
    answer = solution
  if not answer:
    raise Unusable("no short answer in the solution")
  return {
    "domain": "stem",
    "source": f"scp116k-{_slug(row.get('domain'))}",
    "prompt": _text(row, "problem"),
    "answer": answer,
  }


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


def _llama_nemotron_if(row: Mapping[str, Any]) -> dict[str, Any]:
  args = row.get("args")
  if not isinstance(args, dict):
    raise Unusable("no args")
  ids = args.get("instruction_id_list")
  kwargs = args.get("instruction_kwargs")
  if not isinstance(ids, list) or not isinstance(kwargs, list):
    raise Unusable("no instruction_id_list and instruction_kwargs")
  if not ids or len(ids) != len(kwargs):
    raise Unusable("instructions and their arguments differ in number")
  if not all(isinstance(kw, dict) or kw is None for kw in kwargs):
    raise Unusable("the arguments of an instruction are no object")
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
    raise Unusable(f"no {field}")
  if not all(isinstance(m, dict) for m in messages):
    raise Unusable(f"{field} is no list of messages")
  return [
    {"role": m.get("role"), "content": _unix(m.get("content"))}
    for m in messages
  ]


def _text(row: Mapping[str, Any], field: str) -> str:
  value = row.get(field)
  if isinstance(value, int) and not isinstance(value, bool):
    value = str(value)
  if not isinstance(value, str) or not value.strip():
    raise Unusable(f"no {field}")
  return _unix(value)


def _unix(value: Any) -> Any:
  return value.replace("\r\n", "\n") if isinstance(value, str) else value


def _slug(value: Any) -> str:
  slug = re.sub(r"[^a-z0-9_]+", "-", str(value or "other").lower()).strip("-")
  return slug[:64] or "other"


SETS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
  "deepscaler": _deepscaler,
  "eurus2": _eurus2,
  "scp116k": _scp116k,
  "llama_nemotron_if": _llama_nemotron_if,
}
