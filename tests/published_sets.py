"""Stand-ins of public sets in their published columns; no test file."""

import json
import pathlib
from typing import Any

import pytest

COMMA, WORDS = "punctuation:no_comma", "length_constraints:number_words"
LEAST = {"relation": "at least", "num_words": 9}


def written(path: pathlib.Path, rows: list[dict[str, Any]]) -> str:
  """Rows in the form of a file's ending: a list, lines, or parquet."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == ".json":
    path.write_text(json.dumps(rows))
  elif path.suffix == ".jsonl":
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  else:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({n: [row.get(n) for row in rows] for n in names})
    parquet.write_table(table, path)
  return str(path)


def eurus(ability: str, truth: Any, text="Do it.", source="taco"):
  truth = truth if isinstance(truth, str) else json.dumps(truth)
  return {
    "data_source": source,
    "prompt": [
      {"role": "system", "content": "Use [ASSESS] and [ADVANCE]."},
      {"role": "user", "content": text},
    ],
    "ability": ability,
    "reward_model": {"ground_truth": truth, "style": "rule"},
    "extra_info": {"index": 0, "split": "dummy"},
  }


def nemotron(text: str, ids: Any, kwargs: Any) -> dict[str, Any]:
  args = {"instruction_id_list": ids, "instruction_kwargs": kwargs}
  asked = [{"role": "user", "content": text}]
  return {"input": asked, "args": args, "reasoning": "off", "version": "v1"}


def sets(folder: pathlib.Path, count: int = 12) -> dict[str, pathlib.Path]:
  """The files of the four sets, as on the hub, of `count` good rows and one bad
  row each, by the name of the set.
  """
  doubles = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
  files = {
    "deepscaler/deepscaler.json": [
      {"problem": f"What is {i} + 5?", "answer": f"{i + 5}", "solution": ""}
      for i in range(count)
    ] + [{"problem": "Why?", "answer": "", "solution": "Long."}],
    "eurus2/train.parquet": [
      eurus("code", doubles, f"Double, program {i}.") for i in range(count)
    ] + [eurus("math", "42")],
    "scp116k/data/train-00000-of-00001.parquet": [
      {"domain": "Physics", "problem": f"How fast is {i}?",
       "extracted_solution": f"So v = {i}.5 m/s.", "matched_solution": None}
      for i in range(count)
    ] + [{"domain": "Physics", "problem": "And?",
          "extracted_solution": "It is fast, as was shown above."}],
    "llama_nemotron_if/RL/instruction_following/instruction_following.jsonl": [
      nemotron(f"Write {i}.", [COMMA], [{"num_words": None}])
      for i in range(count)
    ] + [nemotron("Write.", [COMMA], [])],
  }  # fmt: skip
  for path, rows in files.items():
    written(folder / path, rows)
  return {path.split("/")[0]: folder / path for path in files}
