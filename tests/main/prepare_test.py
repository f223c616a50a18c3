"""Tests of --mode=prepare: from published sets to the prompts of a run."""

import json

import configured
import hub_cache
import published_sets
import pytest
from messages import mentions, refuses

from brorl_jax.configs import base
from brorl_jax.configs.public import SETS
from brorl_jax.data import dataset, files
from brorl_jax.errors import UserError
from brorl_jax.main import prepare, settings
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.verdicts.domains import DOMAINS

FOUR = ["deepscaler", "eurus2", "scp116k", "llama_nemotron_if"]


def drawn(**fields):
  c = configured.config(prompt_tokens=400, **fields)
  return configured.examples(c, tokenizer.Tokenizer(huggingface.ASSETS))


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """The four sets in a cache of the hub; their files by name."""
  found = published_sets.sets(tmp_path / "hub")
  for name in found:
    repository = SETS[name].place.split(":")[1].replace("/", "--")
    which = {"of": f"datasets--{repository}", "main": tmp_path / "hub" / name}
    hub_cache.made(tmp_path, monkeypatch, **which)
  files._downloaded.cache_clear()
  yield found
  files._downloaded.cache_clear()


def test_from_the_hub_to_a_run_of_five_domains(hub, tmp_path, capsys):
  prepare.run(FOUR, tmp_path / "data")
  out = capsys.readouterr().out
  reasons = "no answer", "mathematics, which", "a sentence", "instructions and"
  for name, reason in zip(FOUR, reasons, strict=True):
    licence = f"{name} ({SETS[name].licence}): 12 kept, 1 dropped"
    assert licence in out and mentions(out, f"1: {reason} ... 13")
  paths = [str(tmp_path / "data" / f"{name}.jsonl") for name in FOUR]
  assert out.splitlines()[-1].endswith(
    f'files="{",".join(map(repr, paths))}," --config.data.puzzles=True '
    "--config.data.skip_bad=True"
  )
  assert sorted(map(str, (tmp_path / "data").iterdir())) == sorted(paths)
  data = {"data.files": tuple(paths), "data.puzzles": True}
  some = drawn(**data)
  assert {some.example(1, p).domain for p in range(200)} == {*DOMAINS}
  assert {e.task for e in some._train["code"]} == {"eurus2-taco"}
  # What a converted row is, the hub's row is for its function.
  fields = ";".join(f"{hub[n]}=brorl_jax.configs.public:{n}" for n in FOUR)
  data |= {"data.files": tuple(map(str, hub.values())), "data.fields": fields}
  raw = drawn(**data, **{"data.skip_bad": True})
  for domain, made in some._train.items():
    asked = lambda all: {(e.question, str(e.entry)) for e in all}
    both = asked(made) | asked(e for e in some._heldout if e.domain == domain)
    assert asked(raw._train[domain]) <= both and len(both) == 12
  assert raw.forms[str(hub["eurus2"])][0] == "brorl_jax.configs.public:eurus2"


@pytest.mark.parametrize("sets, said", [
  (["deepscalr"], "--set='deepscalr' ... did you mean deepscaler?"),
  (["scp"], "--set='scp' ... use some of deepscaler, eurus2, eurus2_math, "),
  (["eurus2", "eurus2=a.json"], "--set=eurus2,eurus2=a.json ... twice"),
  (["eurus2", "deepscaler=a.json"], "deepscaler.jsonl exists; remove it"),
  (["eurus2=none.parquet"], "none.parquet: file does not exist"),
  (["eurus2=bad.json"], "bad.json: not JSON: "),
  (["eurus2=a.json"], "all 1 records are unusable; the first: a.json, row 1"),
  (["llama_nemotron_if"], "hf download nvidia/Llama-Nemotron-Post-Training-"
    'Dataset ... dataset --include "*RL/instruction_following[-./]*"'),
])  # fmt: skip
def test_refusals_leave_nothing(tmp_path, monkeypatch, sets, said):
  monkeypatch.chdir(tmp_path)
  hub_cache.made(tmp_path, monkeypatch)
  files._downloaded.cache_clear()
  (tmp_path / "a.json").write_text('[{"question": "3 + 5?"}]')
  (tmp_path / "bad.json").write_text('[{"problem": ')
  (tmp_path / "deepscaler.jsonl").write_text("mine")
  before = sorted(tmp_path.rglob("*"))
  with refuses(UserError, said):
    prepare.run(sets, tmp_path)
  assert sorted(tmp_path.rglob("*")) == before
  assert (tmp_path / "deepscaler.jsonl").read_text() == "mine"


@pytest.mark.parametrize("given", ["[NaN, 1]", '"\\ud800"'])
def test_rows_that_could_not_be_read_back_are_dropped(tmp_path, given):
  """One of them must not cost the others, nor spoil the file."""
  call = lambda one: {"fn_name": "f", "inputs": [one], "outputs": ["1"]}
  rows = [published_sets.eurus("code", json.dumps(call(one)), f"Number {i}?")
    for i, one in enumerate((given, "2"))]  # fmt: skip
  path = published_sets.written(tmp_path / "a.json", rows)
  prepare.run([f"eurus2={path}"], tmp_path / "data")
  output = str(tmp_path / "data" / "eurus2.jsonl")
  [example] = dataset.read(output, domains=DOMAINS).examples
  assert example.question == "Number 1?" and example.id == "eurus2/1"


def test_held_out_prompts_and_long_rows_are_dropped(tmp_path, capsys):
  tests = [{"inputs": [x], "outputs": ["1"]} for x in ("1", "2", "3" * 10**6)]
  held = {"domain": "code", "prompt": "number 0 ?", "tests": tests[0]}
  rows = [published_sets.eurus("code", x, "Number 0?") for x in tests[:1]]
  rows += [published_sets.eurus("code", x, f"Like {x}?"[:30]) for x in tests]
  path = published_sets.written(tmp_path / "a.json", rows)
  c = base.get_config()
  c.data.heldout_files = (published_sets.written(tmp_path / "h.jsonl", [held]),)
  prepare.run([f"eurus2={path}"], tmp_path / "data", settings.typed(c))
  said = capsys.readouterr().out
  assert "2 kept, 2 dropped" in said and "1: also a held-out" in said
  assert "row 4: longer than 1,000,000 bytes" in said
