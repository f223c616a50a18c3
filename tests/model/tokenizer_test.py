"""Tests of brorl_jax/model/tokenizer.py."""

import contextlib
import datetime
import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tiers
from messages import refuses

from brorl_jax.model import huggingface, tokenizer

TRIAL = tokenizer._trial
HERE = pathlib.Path(__file__).parent
QWEN2 = {"model_type": "qwen2"}


def asked(text):
  return [{"role": "user", "content": text}]


ODD = [
  "", " ", "x", "Calculate the following sum: 12 + 345 = ?",
  "It's 3.5% -- isn't it?\r\n\r\n  indented\ttab \n",
  "Zürich, naïve, Ωμέγα, 数学, emoji 🧮 and a zero-width\u200bspace",
  "12345678901234567890", "'s 'll <|im_start|",
  "\ufb01ne, 10\u00b2",  # would become "fine, 102" were it simplified
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """The tokenizer of the embedded policy, without the policy."""
  path = tmp_path_factory.mktemp("tokenizer")
  names = "tokenizer.json tokenizer_config.json chat_template.jinja"
  for name in names.split():
    shutil.copy(huggingface.ASSETS / name, path)
  return path


@pytest.fixture(autouse=True)
def untried(monkeypatch):
  untried = lambda *_: contextlib.nullcontext([])  # a trial takes two seconds
  monkeypatch.setattr(tokenizer, "_trial", untried)


@pytest.fixture(scope="module")
def built(directory):
  return tokenizer.Tokenizer(directory)


@pytest.fixture
def copy(directory, tmp_path):
  for path in directory.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  return tmp_path


def test_transformers_reads_the_same_ids_from_a_qwen2_directory(copy, built):
  from transformers import AutoTokenizer

  (copy / "config.json").write_text(json.dumps(QWEN2))
  theirs = AutoTokenizer.from_pretrained(copy)
  for text in ODD:
    ids = built.encode(text)
    assert theirs.encode(text, add_special_tokens=False) == ids, text
  rendered = theirs.apply_chat_template(
    asked(ODD[3]), add_generation_prompt=True, return_dict=False
  )
  assert rendered == built.render(asked(ODD[3]))


def test_text_survives(built):
  assert (built.decode(map(built.encode, ODD)), built.decode([])) == (ODD, [])


def test_a_prompt_is_the_question_and_the_ask_token(built):
  (ask,) = built.encode("<|im_start|>")
  assert built.render(asked(ODD[3])) == [*built.encode(ODD[3]), ask]
  assert ask not in built.stop_ids


def test_decoding_leaves_out_what_ends_a_response(built):
  (end,), (pad,) = built.encode("<|im_end|>"), built.encode("<|endoftext|>")
  assert built.stop_ids == (end,)
  assert (pad, end) == (0, 2)  # 0 is what stands behind the end
  # No other special token is left out: 4<|im_start|>2 is not 42.
  for between in ("<|im_start|>", "<|endoftext|>"):
    said = "4" + between + "2"
    assert built.decode([[*built.encode(said), end]]) == [said]
  answer = built.encode("42")
  rows = [[*answer, end], [*answer, end, pad, pad], [end]]
  assert built.decode(rows) == ["42", "42", ""]


def test_encoding_adds_nothing(copy, built):
  path = copy / "tokenizer.json"
  content = json.loads(path.read_text())
  content["post_processor"] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {
      "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}}
  }  # fmt: skip
  write(path, content)
  assert tokenizer.Tokenizer(copy).encode(ODD[3]) == built.encode(ODD[3])


def write(path, text):
  path.write_text(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize("generation, want", [
  ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [5, 7]}, (5, 7)),
  ({"temperature": 0.6}, (2,)),  # as the tokenizer says
  (None, (2,)),
])  # fmt: skip
def test_stop_ids_are_those_of_the_generation_config(copy, generation, want):
  if generation is not None:
    write(copy / "generation_config.json", generation)
  assert tokenizer.Tokenizer(copy).stop_ids == want


def test_stop_ids_of_the_config_count_where_generation_has_none(copy):
  write(copy / "config.json", {"model_type": "llama", "eos_token_id": [5, 9]})
  assert tokenizer.Tokenizer(copy).stop_ids == (5, 9)
  write(copy / "generation_config.json", {"eos_token_id": 7})
  assert tokenizer.Tokenizer(copy).stop_ids == (7,)


@pytest.mark.parametrize(
  "ids, wrong", [([2, "a"], "'a'"), (True, "True"), (-1, "-1"), (512, "512")]
)
def test_a_stop_id_that_is_none_is_refused(copy, ids, wrong):
  write(copy / "generation_config.json", {"eos_token_id": ids})
  refused(copy, f"{copy}: eos_token_id {wrong} ... 0 to 511")


def test_padding_is_the_end_where_there_is_none(copy):
  assert tokenizer.Tokenizer(copy).pad_id == 0
  path = copy / "tokenizer_config.json"
  fields = json.loads(path.read_text())
  del fields["pad_token"]
  path.write_text(json.dumps(fields))
  text = tokenizer.Tokenizer(copy)
  assert text.pad_id == text.stop_ids[0] == 2


def test_a_directory_that_names_no_end_is_refused(copy):
  path = copy / "tokenizer_config.json"
  config = json.loads(path.read_text())
  del config["eos_token"]
  write(path, config)
  refused(copy, f"{copy} ... token")
  (copy / "chat_template.jinja").write_text("")
  refused(copy, f"{copy} ... chat_template.jinja")


def refused(directory, message):
  with refuses(ValueError, message):
    tokenizer.Tokenizer(directory)


@pytest.mark.parametrize("name, text", [
    *(("tokenizer.json", text) for text in ("", "{}", None)),
    ("generation_config.json", "{")])  # fmt: skip
def test_damaged_files_are_refused_in_one_line(copy, name, text):
  path = copy / name
  path.write_text(path.read_text()[:-100] if text is None else text)
  refused(copy, f"{path} is damaged")


def test_a_missing_file_is_refused(copy, tmp_path):
  (copy / "tokenizer.json").unlink()
  refused(copy, f"{copy / 'tokenizer.json'} is missing")
  refused(tmp_path / "x", f"{tmp_path / 'x' / 'tokenizer.json'} is missing")


def test_left_padding_by_hand():
  tokens, mask = tokenizer.left_pad([[3], [1, 2, 4], [7, 7]], 3)
  np.testing.assert_array_equal(tokens, [[0, 0, 3], [1, 2, 4], [0, 7, 7]])
  np.testing.assert_array_equal(
    mask, np.asarray([[0, 0, 1], [1, 1, 1], [0, 1, 1]], bool)
  )
  assert tokens.dtype == np.int32 and mask.dtype == bool
  for prompts, number in ([[1], [1, 2, 3, 4]], 1), ([[]], 0):
    with refuses(ValueError, f"prompt {number} ... 1 to 3"):
      tokenizer.left_pad(prompts, 3)


def test_an_own_template_replaces_the_checkpoints(copy, built, tmp_path):
  path = tmp_path / "mine.jinja"
  body = "{{ messages[0].role }}: {{ messages[0].content }}"
  path.write_bytes(body.encode() + b"\r\n\r\n")
  template = tokenizer.read_template(path)
  # Line ends as transformers reads them: what is exported renders the same.
  assert template == (str(path), body + "\n\n")
  own = tokenizer.Tokenizer(copy, template)
  assert own.template == template and built.template is None
  assert own.render(asked("1 + 1")) == own.encode("user: 1 + 1\n")
  assert own.render(asked("1 + 1")) != built.render(asked("1 + 1"))
  (copy / "chat_template.jinja").write_text(template.text)
  again = tokenizer.Tokenizer(copy)
  assert again.render(asked("1 + 1")) == own.render(asked("1 + 1"))
  assert own.stop_ids == built.stop_ids


def test_a_checkpoint_without_a_template_takes_one(copy):
  (copy / "chat_template.jinja").write_text("")
  given = tokenizer.Template("mine.jinja", "{{ messages[0].content }}")
  text = tokenizer.Tokenizer(copy, given)
  assert text.render(asked("1 + 1")) == text.encode("1 + 1")


def test_templates_that_open_thinking_or_print_the_date(directory, built):
  for line in (HERE / "templates.jsonl").read_text().splitlines():
    case = json.loads(line)
    template = tokenizer.Template("t", case["template"])
    read = functools.partial(tokenizer.Tokenizer, directory, template)
    if refused := case.get("refused"):
      with refuses(ValueError, f"t: ... {refused}"):
        read()
      continue
    text, opened = read("2026-01-05"), case["opened"]
    assert built.decode([text.render(asked("?"))]) == [case["prompt"]], case
    assert text.decode([built.encode("4"), []]) == [opened + "4", opened], case
    assert text.date == ("2026-01-05" if case["dated"] else "")
    assert read().date == (text.date and str(datetime.date.today()))


ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
GROWS = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 300}
TRIALS = [
  (ENDLESS, None, "json with t: takes more than 1 s"),
  ("{% if messages[1] %}" + ENDLESS + "{% endif %}", None, "more than 1 s"),
  ("{{ 'x' * 10**10 }}", None, "with t: takes more than 1,024 MB"),
  ("{{ 'x' * 10**6 }}", None, "t: ... it makes 1,000,001 characters of 1"),
  ("{{ cycler(1) }}", None, "t: its chat template writes at random"),
  ("", {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
   "json with t: pyo3_runtime.PanicException"),
  ("", {"type": "Sequence", "normalizers": [GROWS] * 9}, "takes more than"),
]  # fmt: skip


@pytest.mark.parametrize("more, normalizer, says", tiers.some(TRIALS, 3))
def test_a_foreign_tokenizer_is_tried(
  copy, monkeypatch, more, normalizer, says
):
  monkeypatch.setattr(tokenizer, "_trial", TRIAL)
  monkeypatch.setattr(tokenizer, "_TRIAL_S", 1 if ENDLESS in more else 30)
  monkeypatch.setattr(tokenizer, "_TRIAL_MB", 1024)
  path = copy / "tokenizer.json"
  write(path, json.loads(path.read_text()) | {"normalizer": normalizer})
  with refuses(ValueError, says):
    template = tokenizer.Template("t", "{{ messages[0].content }}" + more)
    tokenizer.Tokenizer(copy, template)


@pytest.mark.parametrize("data, says", [
  (b"hello", ": its chat template leaves out the question"),
  (b"{{ raise_exception('a\nb') }}", ": the chat template fails: a"),
  (b"", ": its chat template is empty"),
  (b"{{ messages[0].content }}{{ range(99) | random }}", ": its chat templat"),
  (b"{{ ().__class__.__base__.__subclasses__() }}", ": the chat template fails")
])  # fmt: skip
def test_a_template_is_refused_by_its_file(directory, tmp_path, data, says):
  path = tmp_path / "mine.jinja"
  path.write_bytes(data)
  with pytest.raises(ValueError) as e:
    tokenizer.Tokenizer(directory, tokenizer.read_template(path))
  assert str(e.value).startswith(f"{path}{says}") and "\n" not in str(e.value)


def test_a_template_that_cannot_be_read_is_refused(tmp_path):
  path = tmp_path / "mine.jinja"
  with pytest.raises(ValueError, match=r"mine\.jinja cannot be read"):
    tokenizer.read_template(path)
  with pytest.raises(ValueError, match=r"is not a regular file"):
    tokenizer.read_template(tmp_path)
  path.write_bytes(b"\xff")
  with pytest.raises(ValueError, match=r"mine\.jinja.*UTF-8"):
    tokenizer.read_template(str(path))
