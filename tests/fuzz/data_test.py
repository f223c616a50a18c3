"""Any bytes as a line of a data file: an example, or an error with a place."""

import json
import pathlib
import tempfile

import fuzzing
from hypothesis import strategies as st

from brorl_jax.data import dataset
from brorl_jax.data.schema import Form
from brorl_jax.verdicts.domains import DOMAINS, OWN

_SECONDS = 2.0
_GCD = {
  "question": "Find the Greatest Common Divisor (GCD) of 8 and 12.",
  "answer": "4", "metadata": {"source_dataset": "gcd", "source_index": 0},
}  # fmt: skip
# A good line of each domain; what is fuzzed is not good any more.
_GOOD = {
  "math": {"prompt": "What is 3 + 5?", "answer": "8"},
  "stem": {"prompt": "A) x B) y", "answer": "A", "choices": ["x", "y"]},
  "code": {"prompt": "Double it.",
    "tests": {"inputs": ["1", "2"], "outputs": ["2", "4"]}, "time_limit": 2},
  "instructions": {"prompt": "No comma.",
    "instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]},
  "gym": {"prompt": "Which?", "entry": _GCD},
}  # fmt: skip
_FORMS = st.sampled_from([
  Form(), Form(domain="math"), Form({"prompt": "a.b", "answer": "x"}, "math"),
  Form(sole=OWN),
])  # fmt: skip


def encoded(value, ascii_only):
  text = json.dumps(value, ensure_ascii=ascii_only)
  return text.encode(errors="surrogatepass").replace(b"\n", b"\\n")


@st.composite
def records(draw):
  """A good record with a value at any depth taken, replaced or renamed."""
  domain = draw(st.sampled_from(sorted(_GOOD)))
  record = json.loads(json.dumps(_GOOD[domain] | {"id": "a", "domain": domain}))
  for _ in range(draw(st.integers(1, 2))):
    fuzzing.mutate(draw, record)
  return encoded(record, draw(st.booleans()))


_PIECES = st.sampled_from([
  *rb'" \ { [ , : \ud800 \u0000 NaN -Infinity 1e999 "id":"b",'.split(),
  *(b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"", b"9" * 5000),
  *(b'"domain":"math",', b"[" * 3000, b'{"a":' * 3000),
])  # fmt: skip
_LINES = st.one_of(records(), st.builds(fuzzing.spliced, records(),
    st.integers(0, 400), st.integers(0, 9), _PIECES), st.binary(max_size=60),
  fuzzing.JSON.map(lambda x: encoded(x, True)))  # fmt: skip


def check_line(line, form):
  line = line.replace(b"\n", b" ")
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "data.jsonl"
    first = (
      b'{"prompt":"1+1","answer":"2","domain":"math","a":{"b":"c"},"x":"2"}'
    )
    path.write_bytes(first + b"\n" + line + b"\n")
    try:
      with fuzzing.within(_SECONDS):
        data = dataset.read(str(path), form=form, domains=DOMAINS)
    except dataset.DataError as e:
      text = fuzzing.one_line(e, longest=len(str(path)) + 600)
      assert text.startswith(f"{path}, line 2"), text
      assert text.isprintable()
      return
    assert len(data.examples) == 2
    # What is read can be written, asked and compared.
    json.dumps(data.examples[1].entry, allow_nan=False)
    data.examples[1].question.encode()
    dataset.digest(data.examples)


_KNOWN = {
  "the name of a column was shown as it is": (
    b'{"\\nprompt": "Which?", "answer": "8"}',
    Form(domain="math"),
  ),
  "a long id was shown with all of it": (
    encoded(
      _GOOD["instructions"]
      | {"domain": "instructions", "instructions": [{"id": "x" * 5000}]},
      True,
    ),
    Form(),
  ),
}
test_lines, test_many_lines = fuzzing.tiers(
  _LINES, _FORMS, few=300, many=20_000, known=_KNOWN
)(check_line)
