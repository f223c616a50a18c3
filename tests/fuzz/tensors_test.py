"""Damaged safetensors: refused in one line, or read as the file says.

The format has no digest: what keeps names, shapes and sizes cannot be told
from other weights. So what is loaded is compared with another reader of the
same bytes, which is a few lines of numpy.
"""

import functools
import json
import pathlib
import tempfile
from unittest import mock

import fuzzing
import numpy as np
from hypothesis import strategies as st
from saved_models import INDEX, TINY, WEIGHTS, random_params, same

from brorl_jax.model import architectures, huggingface

_DTYPES = {"F32": "<f4", "F16": "<f2"}


@functools.cache
def model():
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    huggingface.save(path, TINY, random_params(), dtype="float32")
    whole = {p.name: p.read_bytes() for p in path.iterdir()}
    huggingface.save(path, TINY, random_params(), shard_bytes=5000)
    return whole, {p.name: p.read_bytes() for p in path.iterdir()}


def unpacked(data):
  """Header and tensors of a file, by the definition of the format."""
  size = int.from_bytes(data[:8], "little")
  return json.loads(data[8 : 8 + size]), data[8 + size :]


def packed(header, body):
  text = json.dumps(header).encode(errors="surrogatepass")
  return len(text).to_bytes(8, "little") + text + body


def tensors(files):
  out = {}
  for data in (d for name, d in files.items() if name.endswith("tensors")):
    header, body = unpacked(data)
    for name, about in header.items():
      if name == "__metadata__":
        continue
      begin, end = about["data_offsets"]
      value = np.frombuffer(body[begin:end], _DTYPES[about["dtype"]])
      out[name] = value.reshape(about["shape"]).astype(np.float32)
  return out


_layout = functools.cache(lambda: huggingface.stored_layout(TINY, None))


def slices(directory, files, stored, places, layers, mesh, dtype):
  """What `huggingface.read_tensors` reads, without programs to be compiled."""
  names = huggingface._tensors(stored, layers)
  return {name: files[name][:].astype(np.float32) for name in names}


def load_or_refuse(files):
  with tempfile.TemporaryDirectory() as folder:
    inside = pathlib.Path(folder) / "model"
    for place in (inside, inside.parent / "other"):
      place.mkdir()
      # What a name that leads outside would find.
      (place.parent / WEIGHTS).write_bytes(model()[0][WEIGHTS])
    for name, data in files.items():
      (inside / name).write_bytes(data)
    try:
      return huggingface.load(inside)[1]
    except ValueError as e:
      text = fuzzing.one_line(e)
      assert folder in text and text.isprintable(), text


def check_loaded(files):
  layout = _layout()
  with (
    mock.patch.object(huggingface, "read_tensors", slices),
    mock.patch.object(huggingface, "stored_layout", lambda *_: layout),
    mock.patch.object(architectures, "read_policy", lambda *_, **__: TINY),
  ):
    loaded = load_or_refuse(files)
  if loaded is not None:
    want = tensors(files)
    for name, value in loaded.items():
      np.testing.assert_array_equal(value, want[name])
  return loaded


def test_what_is_not_damaged_is_loaded():
  for files in model():
    assert check_loaded(files) is not None
    same(load_or_refuse(files), random_params())


# Deferred: a process that only collects the tests makes no model.
_TENSORS = st.deferred(
  lambda: st.sampled_from(sorted(unpacked(model()[0][WEIGHTS])[0]))
)
_NAMES = _TENSORS | fuzzing.TEXTS
_KINDS = "F32 F16 BF16 F64 I8 U64 BOOL F8_E4M3 f32".split()
_SIZES = st.sampled_from([0, 1, 2, 16, 24, 2**40, -1])
_ENDS = st.sampled_from([[0, 2**63], [0, 2**64], [2**64 - 4, 2**64]])
_ABOUT = st.fixed_dictionaries({}, optional={
  "dtype": st.sampled_from(_KINDS) | fuzzing.JSON,
  "shape": st.lists(_SIZES, max_size=3) | fuzzing.JSON,
  "data_offsets":
    st.lists(st.integers(-9, 20_000), max_size=3) | _ENDS | fuzzing.JSON,
})  # fmt: skip


@st.composite
def headers(draw):
  """A header with an entry changed, taken, added, or swapped with another."""
  header, body = unpacked(model()[0][WEIGHTS])
  name, what = draw(_TENSORS), draw(st.integers(0, 5))
  if what == 0:
    header[name] = header[name] | draw(_ABOUT)
  elif what == 1:
    header[draw(_NAMES)] = header.pop(name)
  elif what == 2:
    header[draw(_NAMES)] = draw(_ABOUT)
  elif what == 3:
    other = draw(_TENSORS)
    header[name], header[other] = header[other], header[name]
  elif what == 4:
    fuzzing.mutate(draw, header)
  else:
    body = body[: draw(st.integers(0, len(body)))] + draw(st.binary(max_size=9))
  return packed(header, body)


_RAW = st.builds(fuzzing.spliced, st.builds(lambda: model()[0][WEIGHTS])
  | headers(), st.integers(0, 40) | st.integers(0, 10**6),
  st.sampled_from([0, 1, 8, 100, 10**9]), st.binary(max_size=8))  # fmt: skip


def check_file(data):
  try:
    check_loaded(model()[0] | {WEIGHTS: data})
  except (KeyError, json.JSONDecodeError) as e:
    # The other reader cannot read it, but it was loaded.
    raise AssertionError(repr(e)) from e


test_headers, test_many_headers = fuzzing.tiers(
  headers() | _RAW, few=150, many=20_000
)(check_file)


@st.composite
def indexes(draw):
  """An index with files that are elsewhere, or tensors that are."""
  index = json.loads(model()[1][INDEX])
  where = index["weight_map"]
  for _ in range(draw(st.integers(1, 2))):
    if draw(st.booleans()):
      places = [
        f"../{WEIGHTS}", f"other/{WEIGHTS}", "/etc/passwd", "config.json",
      ]  # fmt: skip
      name = draw(st.sampled_from(sorted(where)))
      where[name] = draw(st.sampled_from(places) | fuzzing.JSON)
    else:
      fuzzing.mutate(draw, index)
  text = json.dumps(index)
  return text if draw(st.booleans()) else text[: draw(st.integers(0, 2000))]


def check_index(text):
  check_loaded(model()[1] | {INDEX: text.encode()})


_KNOWN = {
  "a list was taken for a name": (
    f'{{"weight_map": {{"a": [["{"x" * 5000}"]]}}}}',
  ),
  "a name was shown as it is": ('{"weight_map": {"a": "\\u001b[2J"}}',),
}
test_indexes, test_many_indexes = fuzzing.tiers(
  indexes(), few=150, many=20_000, known=_KNOWN
)(check_index)
