"""What `config.checkpoint` names: weights of a hub, or those of a run."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from brorl_jax import architectures, checkpoints, hf, sharding, tokenizer
from brorl_jax.main.settings import ASSETS
from brorl_jax.policy import Policy

TRAINED_ON = "trained_on.json"  # beside the weights of an exported run


class Trained(NamedTuple):
  """Where a policy is."""

  source: pathlib.Path  # Hugging Face directory: its kind and its tokenizer
  run: pathlib.Path | None = None  # whose weights they are; None: of `source`
  step: int | None = None  # of the run; None is the newest


def locate(checkpoint: str) -> Trained:
  """A run, one of its checkpoints, a directory, or a name of the hub.

  Raises:
    ValueError: It is none of these.
  """
  if (found := of_a_run(checkpoint)) is not None:
    return found
  return Trained(hf.locate(checkpoint) if checkpoint else ASSETS)


def of_a_run(checkpoint: str) -> Trained | None:
  """The folder of a run or one of its checkpoints; None if it is neither.

  Raises:
    ValueError: What the run began with is not there.
  """
  path = pathlib.Path(checkpoint or ".").absolute()
  run, step = path, None
  if path.parent.name == "checkpoints" and path.name.isdigit():
    run, step = path.parents[1], int(path.name)
  if not checkpoint or not (run / "checkpoints").is_dir():
    return None
  return Trained(_source(run), run.resolve(), step)


class Start(NamedTuple):
  """What one start of a run trained on, as its config.json tells it."""

  run: str
  files: list[str]  # as its config named them
  digests: dict[str, str] | None  # by absolute path; older runs have none
  heldout_one_in: int  # of the prompts of its files; 0: none of them
  made: list[str]  # tasks of which it may have made puzzles


def starts(which: Trained) -> list[Start]:
  """What led to a policy, as far as it is known, the newest first.

  Raises:
    ValueError: It is known but cannot be read.
  """
  out, beside = [], which.source / TRAINED_ON
  if which.run is not None:
    path = which.run / "config.json"
    out = [_start(which.run, one, path) for one in _records(path)]
  if beside.exists():
    try:
      out += [Start(**one) for one in architectures.read_json(beside)["starts"]]
    except (KeyError, TypeError):
      raise ValueError(f"{beside} is not as --mode=export writes it") from None
  return out


def _start(
  run: pathlib.Path, record: Mapping[str, Any], path: pathlib.Path
) -> Start:
  try:
    c = record["config"]
    made = c["families"] if c["domains"]["gym"]["weight"] > 0.0 else {}
    return Start(
      str(run),
      list(c["data"]["files"]),
      record.get("files"),
      0 if c["data"]["heldout_files"] else c["data"]["heldout_one_in"],
      [name for name, family in made.items() if family["weight"] > 0.0],
    )
  except (AttributeError, KeyError, TypeError):
    raise ValueError(f"{path} is not that of a run") from None


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  """What config.json tells of each start of a run, the newest first.

  Raises:
    ValueError: It is not that of a run.
  """
  record = architectures.read_json(path)
  earlier = record.get("earlier", [])
  if not isinstance(record.get("config"), dict) or type(earlier) is not list:
    raise ValueError(f"{path} is not that of a run")
  return [record, *reversed(earlier)]


def load(
  which: Trained, mesh: Mesh, *, dtype: str
) -> tuple[Policy, PyTree, int | None]:
  """Policy, its parameters in float32, and the step of the run.

  Raises:
    ValueError: They cannot be read, or are damaged.
  """
  if which.run is None:
    return *hf.load(which.source, dtype=dtype, mesh=mesh), None
  policy = architectures.read_policy(which.source, dtype=dtype)
  abstract = jax.eval_shape(policy.init, jax.random.key(0))
  like = jax.tree.map(
    lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    abstract,
    sharding.param_shardings(abstract, mesh),
  )
  step, params = checkpoints.read_params(
    which.run / "checkpoints",
    which.step,
    like,
    _records(which.run / "config.json")[0].get("run"),
  )
  return policy, params, step


def check_vocabulary(
  source: str | pathlib.Path, text: tokenizer.Tokenizer, policy: Policy
) -> None:
  """Raises ValueError if the policy does not know all of the text's tokens."""
  largest = max(text.size - 1, *text.stop_ids)
  if largest >= policy.vocab:
    raise ValueError(
      f"{source}: the tokenizer has an id {largest}, the embedding only "
      f"{policy.vocab} rows"
    )


def _source(run: pathlib.Path) -> pathlib.Path:
  """The Hugging Face directory that a run began with."""
  try:
    checkpoint = _records(run / "config.json")[0]["config"]["checkpoint"]
  except KeyError:
    raise ValueError(f"{run / 'config.json'} is not that of a run") from None
  try:
    return hf.locate(checkpoint) if checkpoint else ASSETS
  except ValueError as e:
    raise ValueError(f"{run / 'config.json'}: the run began with {e}") from None
