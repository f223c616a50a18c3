"""Where a policy comes from: a run, a checkpoint, or a model directory."""

import contextlib
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import PyTree

from brorl_jax.model import (
  adapters,
  architectures,
  huggingface,
  sharding,
  tokenizer,
)
from brorl_jax.model.policy import Policy
from brorl_jax.runs import checkpoints, intact
from brorl_jax.verdicts.base import MADE

TRAINED_ON = "trained_on.json"  # next to the weights of an exported run


class CheckpointSource(NamedTuple):
  """Where a policy comes from."""

  source: pathlib.Path  # Hugging Face directory: architecture and tokenizer
  run: pathlib.Path | None = None  # with the weights; None: `source` has them
  step: int | None = None  # step of the run; None: the newest


def locate(checkpoint: str) -> CheckpointSource:
  """Finds a run, one of its checkpoints, a directory, or a model of the hub.

  Raises ValueError if it is none of these.
  """
  found = find_run(checkpoint)
  return found or CheckpointSource(huggingface.locate(checkpoint))


def find_run(checkpoint: str) -> CheckpointSource | None:
  """The folder of a run or one of its checkpoints; None if it is neither.

  Raises ValueError if the model that the run started from is missing.
  """
  path = pathlib.Path(checkpoint or ".").absolute()
  run, step = path, None
  if path.parent.name == "checkpoints" and path.name.isdecimal():
    run, step = path.parents[1], int(path.name)
  if not checkpoint or not (run / "checkpoints").is_dir():
    return None
  config = run / "config.json"
  with _written_by(config, "a run"):
    record = _records(config)[0]
    name = record["config"]["policy"]["checkpoint"]
    began = pathlib.Path(record["began_with"])
  # A relative path in the config is relative to where the run was started.
  if not (name and began.is_dir()):
    try:
      began = huggingface.locate(name)
    except ValueError as e:
      raise ValueError(f"{config}: the model it started from: {e}") from None
  return CheckpointSource(began, run.resolve(), step)


def read_tokenizer(
  which: CheckpointSource, given: str = "", today: str = ""
) -> tokenizer.Tokenizer:
  """The tokenizer of a policy, with the chat template of its training.

  `given` is `policy.chat_template`: a file that overrides the template of the
  run. A template that prints the date prints the run's, else `today`. Raises
  ValueError if one of them cannot be read.
  """
  template = None
  if which.run is not None:
    record = _records(which.run / "config.json")[0]
    today = (record.get("data") or {}).get(tokenizer.DATE, today)
    if text := record.get("chat_template"):
      template = tokenizer.Template(str(which.run), text)
  if given:
    template = tokenizer.read_template(given)
  return tokenizer.Tokenizer(which.source, template, today)


class Ran(NamedTuple):
  """How a run posed its prompts, at its newest start."""

  dtype: str
  max_new_tokens: int
  system: str
  instructions: dict[str, str]  # by domain, the text after each question
  fields: str  # data.fields of its config
  entries: list[str]  # its data.files and data.heldout_files
  domain: str  # data.domain of its config
  own: bool  # whether the user's own functions gave the rewards


def ran(which: CheckpointSource) -> Ran | None:
  """How the run of a policy posed its prompts; None if there is no run.

  Raises ValueError if its config.json cannot be read.
  """
  if which.run is None:
    return None
  path = which.run / "config.json"
  with _written_by(path, "a run"):
    c = _records(path)[0]["config"]
    data = c["data"]
    return Ran(
      c["policy"]["dtype"],
      c["sampling"]["max_new_tokens"],
      data["system"],
      {name: d["instruction"] for name, d in data["domains"].items()},
      data["fields"],
      [*data["files"], *data["heldout_files"]],
      data["domain"],
      bool(c["reward"]["verifier"]),
    )


def checkpoint(which: CheckpointSource) -> str:
  """What a run started from: a model of the hub, or else the directory."""
  record = _records((which.run or which.source) / "config.json")[0]
  name = record["config"]["policy"]["checkpoint"]
  on_hub = huggingface.HUB.fullmatch(name) and not pathlib.Path(name).is_dir()
  return name if on_hub else str(which.source.resolve())


class Start(NamedTuple):
  """The training data of one start of a run, from its config.json."""

  run: str
  files: dict[str, str]  # digests, by absolute path
  heldout_one_in: int  # share of the files that it held out; 0: nothing
  made: list[str]  # tasks whose puzzles it may have generated
  forms: dict[str, list[str]]  # `Form.how` and `Form.digest` of each file
  dropped: list[str]  # `dataset.worded` of prompts that it left out, hex
  domain: str  # data.domain of its config
  own: bool  # whether the user's own functions gave the rewards


def starts(which: CheckpointSource) -> list[Start]:
  """The starts of all runs that led to a policy, the newest first.

  Raises ValueError if a record of them cannot be read.
  """
  out, exported = [], which.source / TRAINED_ON
  if which.run is not None:
    path = which.run / "config.json"
    with _written_by(path, "a run"):
      out = [_start(which.run, record) for record in _records(path)]
  if exported.exists():
    with _written_by(exported, "--mode=export"):
      out += [Start(**x) for x in architectures.read_json(exported)["starts"]]
  return out


def _start(run: pathlib.Path, record: Mapping[str, Any]) -> Start:
  values = record["config"]
  c, own = values["data"], bool(values["reward"]["verifier"])
  mixed = (c["puzzles"] or not c["files"]) and not own
  made = mixed and c["domains"][MADE]["weight"] > 0.0
  families = c["families"] if made else {}
  return Start(
    str(run),
    record["files"],
    0 if c["heldout_files"] else c["heldout_one_in"],
    [name for name, family in families.items() if family["weight"] > 0.0],
    record["forms"],
    record["dropped"],
    c["domain"],
    own,
  )


@contextlib.contextmanager
def _written_by(path: pathlib.Path, writer: str) -> Iterator[None]:
  try:
    yield
  except (AttributeError, KeyError, TypeError):
    raise ValueError(f"{path} was not written by {writer}") from None


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  """The record of each start of a run in config.json, the newest first."""
  record = architectures.read_json(path)
  if not isinstance(record.get("config"), dict):
    raise ValueError(f"{path} was not written by a run")
  return [record, *reversed(record.get("earlier") or [])]


def load(
  which: CheckpointSource,
  mesh: Mesh | None,
  *,
  dtype: str,
  param_dtype: str = "float32",
) -> tuple[Policy, PyTree, int | None]:
  """Loads a policy: its description, its parameters, and the step of the run.

  They lie on the devices of `mesh`, or on the first device if it is None. Those
  of a run are read in float32 first, and an adapter is merged. Raises
  ValueError if they cannot be read.
  """
  if which.run is None:
    loaded = huggingface.load(
      which.source, dtype=dtype, mesh=mesh, param_dtype=param_dtype
    )
    return *loaded, None
  policy, params, step = load_run(which, mesh, dtype=dtype)
  params = jax.jit(functools.partial(adapters.merged, policy))(params)
  params = jax.tree.map(lambda x: x.astype(param_dtype), params)
  return adapters.alone(policy), params, step


def load_run(
  which: CheckpointSource, mesh: Mesh | None, *, dtype: str
) -> tuple[Policy, PyTree, int]:
  """As `load`, of a run: float32 parameters, its adapter beside the base."""
  assert which.run is not None
  path = which.run / "config.json"
  with _written_by(path, "a run"):
    record = _records(path)[0]
    c = record["config"]["policy"]
    at = c["lora_rank"], c["lora_alpha"], (*c["lora_layers"],)
  policy = architectures.read_policy(which.source, dtype=dtype)
  policy = adapters.adapted(policy, *at)
  first = SingleDeviceSharding(jax.devices()[0])
  places = jax.tree.map(lambda _: first, policy.shapes)
  if mesh is not None:
    places = sharding.param_shardings(policy.shapes, mesh)
  like = jax.tree.map(
    lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    policy.shapes,
    places,
  )
  step, params = checkpoints.read_params(
    which.run / "checkpoints",
    which.step,
    adapters.split(like)[0],
    record.get("run"),
  )
  if policy.lora_rank:
    base = huggingface.load(which.source, dtype=dtype, mesh=mesh)[1]
    base_digest(which.source, base, record["base"])
    params = adapters.join(params, base)
  return policy, params, step


def base_digest(
  source: pathlib.Path, base: PyTree, saved: Mapping[str, str] | None
) -> dict[str, str]:
  """Digests of the weights beside which an adapter is trained. Raises
  ValueError if they are not those that a run `saved`.
  """
  found = intact.digest(base, saved)
  for name, value in (saved or found).items():
    if found.get(name) != value:
      raise ValueError(
        f"{source}: {name} has changed since this run began, and its "
        "checkpoints hold the adapter alone; restore the directory"
      )
  return found


def check_vocabulary(
  source: str | pathlib.Path, text: tokenizer.Tokenizer, policy: Policy
) -> None:
  """Raises ValueError if the tokenizer has ids beyond the embedding."""
  largest = max(text.size - 1, *text.stop_ids)
  if largest >= policy.vocab:
    raise ValueError(
      f"{source}: the tokenizer has the id {largest}, but the embedding has "
      f"only {policy.vocab} rows; use the tokenizer of this model"
    )
