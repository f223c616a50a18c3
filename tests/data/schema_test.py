"""Tests of brorl_jax/data/schema.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions, refuses

from brorl_jax.data import schema
from brorl_jax.data.schema import Form
from brorl_jax.verdicts.strict_json import Refused

KNOWN = ("id", "prompt", "messages", "answer", "source", "time_limit")


@pytest.mark.parametrize("text, want", [
  ("", {}), ("prompt:question", {"prompt": "question"}),
  (" prompt: question , answer:answer,",
    {"prompt": "question", "answer": "answer"}),
  ("answer:reward_model.ground_truth",
    {"answer": "reward_model.ground_truth"}),
  ("prompt:text,answer:text", {"prompt": "text", "answer": "text"}),
  ("answer:a:b", {"answer": "a:b"}),
])  # fmt: skip
def test_a_map_of_fields_by_hand(text, want):
  assert schema.parse(text, KNOWN) == want


@pytest.mark.parametrize("text, says", [
  ("question", "'question' ... field:column ... prompt:question"),
  ("prompt:", "'prompt:' ... field:column"),
  ("promt:question", "'promt:question' ... 'promt'"),
  ("x:y", "'x:y' ... 'x' ... prompt ... answer"), ("id:a,id:b", "'id:b'"),
])  # fmt: skip
def test_a_map_of_fields_that_is_none(text, says):
  with refuses(ValueError, says):
    schema.parse(text, KNOWN)


MINE = """import math
def row(row):
  row.pop("id", None)
  if row["n"] < 0:
    raise ValueError("n is\\nnegative")
  return {"prompt": f"{row['n']}?", "answer": {3: (3,)}.get(row["n"], "1")}
def none(row): return None
def odd(row): return {"answer": {1}}
def ends(row): exit(3)
"""


def test_files_of_their_own_form(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(MINE)
  files = ["a.jsonl", "a.jsonl=b", "hub:o/n:test"]
  text = "prompt:q; a.jsonl=answer:c.d:e ;a.jsonl=b=mine.py:row;"
  math = Form(domain="math")
  of = lambda text, files=files: schema.form(text, files, KNOWN, math)
  form = of(text + "hub:o/n:test=brorl_jax.data.schema:show")
  a, b, hub = (form.entries[file] for file in files)
  assert (form.names, a.names) == ({"prompt": "q"}, {"answer": "c.d:e"})
  assert (b.how, len(b.digest)) == (f"{tmp_path}/mine.py:row", 32)
  assert {form.domain, a.domain, b.domain, hub.domain} == {"math"}
  assert hub.function is schema.show and of(b.how).function is b.function
  row = {"id": 7, "n": 3, "bad": Refused("bad", "x")}
  assert schema.record(row, b) == {"prompt": "3?", "answer": [3]}
  assert schema.record(row, a) is row and len(row) == 3  # a copy was changed
  with refuses(Refused, "n is negative"):
    schema.record({"n": -1}, b)
  with refuses(Refused, "null, not a JSON object"):
    schema.record({"n": 1}, of("mine.py:none"))
  for how, n, said in (
    ("row", None, "line 4: TypeError: "), ("ends", 1, "line 9: SystemExit: 3"),
    ("odd", 1, "line 8: TypeError: Object of type set"),
  ):  # fmt: skip
    with refuses(RuntimeError, f"{tmp_path}/mine.py:{how}, {said}"):
      schema.record({"n": n}, of(f"mine.py:{how}"))


@pytest.mark.parametrize("text, says", [
  ("a.json=prompt:q", "'a.json' is no entry ... did you mean a.jsonl?"),
  ("base=prompt:q", "'base' is no entry ... use one of a.jsonl, b"),
  ("other=x:y=prompt:q", "'other=x:y' is no entry ... use one of a.jsonl, b"),
  ("prompt:q;answer:a", "all other files: 'prompt:q' and 'answer:a' ... one"),
  ("b=prompt:q;b=prompt:r", "b: 'prompt:q' and 'b=prompt:r' are given"),
  ("b=promt:q", "'promt:q' ... did you mean prompt?"),
  ("none.py:row", "the function = 'none.py:row' ... does not exist"),
  ("brorl_jax.data.schema:reco", "has no function ... did you mean record?"),
])  # fmt: skip
def test_a_form_that_is_none(text, says):
  with refuses(ValueError, says):
    schema.form(text, ["a.jsonl", "b"], KNOWN)


def test_renamed_columns_are_fields_and_the_others_stay():
  record = {"question": "1 + 1?",
    "answer": "long", "reward_model": {"style": "rule", "ground_truth": "2"},
    "a.b": 3, "a": {"b": 4}, "level": "easy"}  # fmt: skip
  names = {
    "prompt": "question", "answer": "reward_model.ground_truth",
    "source": "level",
    "id": "a.b",  # a column of that very name comes first
  }  # fmt: skip
  values, others = schema.renamed(record, names)
  assert values == {
    "prompt": "1 + 1?", "answer": "2", "source": "easy", "id": 3,
  }  # fmt: skip
  assert others == {
    "answer": "long", "reward_model": record["reward_model"], "a": {"b": 4}
  }  # fmt: skip
  assert schema.renamed(record, {}) == ({}, record)


@pytest.mark.parametrize("column, says", [
  ("qestion", "missing ... config.data.fields ... 'question'"),
  ("x", "missing ... config.data.fields"),
  ("inner.trth", "inner.trth ... missing ... 'truth'?"),
  ("inner.truth.more", "inner.truth.more ... missing"),
  ("question.text", "question.text ... missing"),
])  # fmt: skip
def test_a_column_that_is_not_there_is_named_with_those_that_are(column, says):
  record = {"question": "a text", "inner": {"truth": "2"}}
  with pytest.raises(Refused) as e:
    schema.renamed(record, {"prompt": column})
  assert mentions(str(e.value), says)
  assert e.value.field == column and "\n" not in str(e.value)


def test_a_field_that_is_missing_is_looked_for_among_the_columns():
  say = lambda field, *there: str(schema.missing(field, there))
  assert mentions(say("answer"), "missing ... answer")
  says = "missing ... 'anwser' ... --config.data.fields=answer:anwser"
  assert mentions(say("answer", "anwser", "level"), says)
  said = say("prompt", "question", "level")
  assert mentions(said, "missing ... --config.data.fields=prompt:COLUMN")
  long = say("prompt", *(f"column_{i}" for i in range(1000)), "\n")
  assert len(long) < 250 and "\n" not in long


@pytest.mark.parametrize("column, refused", [
  ("time_limt", True), ("timelimit", True), ("time_limits", True),
  ("time_lmiit", True), ("time_1imit", True), ("Time_limit", True),
  ("soruce", True), ("time", False), ("data_source", False),
  ("resource", False), ("difficulty", False), ("", False),
  ("timelimt", False),  # two slips
  ("idx", False),  # a slip away from id, and a column of its own
  ("fou", False),  # of four letters
])  # fmt: skip
def test_a_slip_in_an_optional_field_is_no_column(column, refused):
  fields = ("time_limit", "source", "id", "four")
  if not refused:
    return schema.refuse_slips([column], fields)
  with pytest.raises(Refused, match=r"did you mean (time_limit|source)") as e:
    schema.refuse_slips(["level", column], fields)
  assert e.value.field == column


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_a_slip_is_as_it_is_written_out(a, b):
  """A second implementation: everything that is a slip away from b."""
  letters = "abc"
  places = range(len(b) + 1)
  away = {b[:i] + b[i + 1 :] for i in places}
  away |= {b[:i] + x + b[i:] for i in places for x in letters}
  away |= {b[:i] + x + b[i + 1 :] for i in places for x in letters}
  away |= {b[:i] + b[i : i + 2][::-1] + b[i + 2 :] for i in places}
  assert schema._slip(a, b) == (a in away)
