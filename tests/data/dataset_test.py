"""Tests of brorl_jax/data/dataset.py."""

import json

import pytest

from brorl_jax.data import dataset, heldout
from brorl_jax.data.records import DataError


def write(path, *lines):
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def test_pairs_are_prompts_or_conversations_with_a_response(tmp_path):
  talk = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
  ]
  path = write(
    tmp_path / "a.jsonl",
    {"prompt": "1 + 1?", "response": " two\n"},
    {"messages": talk, "response": "4", "domain": "chat", "score": 0.5},
  )
  data = dataset.read_pairs(path, names={})
  first, second = data.examples
  assert list(first.messages) == [{"role": "user", "content": "1 + 1?"}]
  assert list(second.messages) == talk
  # As it is written, blanks included.
  assert [dataset.pair_response(x) for x in data.examples] == [" two\n", "4"]
  assert [first.id, second.id] == ["a/1", "a/2"]


def test_columns_may_have_other_names(tmp_path):
  path = write(tmp_path / "a.jsonl", {"question": "1?", "out": {"text": "x"}})
  names = {"prompt": "question", "response": "out.text"}
  (one,) = dataset.read_pairs(path, names=names).examples
  assert one.question == "1?" and dataset.pair_response(one) == "x"


def test_a_prompt_may_have_several_responses(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    *({"prompt": "A fruit?", "response": x} for x in ("apple", "pear")),
  )
  assert len(dataset.read_pairs(path, names={}).examples) == 2


@pytest.mark.parametrize(
  "line, says",
  [
    ({"prompt": "1?"}, "field 'response': missing"),
    ({"prompt": "1?"}, "--config.data.fields=response:COLUMN"),
    ({"prompt": "1?", "response": 3}, "field 'response': 3; write it as text"),
    ({"prompt": "1?", "response": " "}, "field 'response': empty"),
    ({"prompt": "1?", "response": "a <|im_end|>"}, "is a control token"),
    ({"response": "a"}, "field 'prompt': missing"),
    ({"prompt": "", "response": "a"}, "field 'prompt': empty"),
  ],
)
def test_what_is_no_pair_is_refused_by_file_line_and_field(
  tmp_path, line, says
):
  path = write(tmp_path / "a.jsonl", {"prompt": "1?", "response": "x"}, line)
  with pytest.raises(DataError) as e:
    dataset.read_pairs(path, names={})
  assert str(e.value).startswith(f"{path}, line 2, field ")
  assert says in str(e.value) and "\n" not in str(e.value)
  data = dataset.read_pairs(path, names={}, skip_bad=True)
  assert len(data.examples) == len(data.skipped) == 1


def test_prompts_are_held_out_whatever_their_responses(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    *(
      {"prompt": f"Number {i}?", "response": word}
      for i in range(60)
      for word in ("yes", "no")
    ),
  )
  train, held = heldout.split(dataset.read_pairs(path, names={}), one_in=4)
  asked = lambda data: {x.question for x in data.examples}
  assert not asked(train) & asked(held)
  assert len(asked(train) | asked(held)) == 60
  assert 4 <= len(asked(held)) <= 28
  assert len(held.examples) == 2 * len(asked(held))
