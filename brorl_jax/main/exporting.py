"""A run's policy as a Hugging Face directory."""

import json
import pathlib
import tempfile

import jax
from absl import logging

from brorl_jax import architectures, checkpoints, hf, sharding, tokenizer
from brorl_jax.main import folder, settings
from brorl_jax.main.settings import ASSETS, Config


def run(c: Config, workdir: pathlib.Path) -> None:
  """Writes what `config.checkpoint` holds to `workdir`.

  `config.checkpoint` is the folder of a run, or one step of it:
  runs/n512/checkpoints/60. Weights get the dtype that the run began with.
  """
  folder.check_empty(workdir)
  logging.set_verbosity(logging.ERROR)  # orbax tells of every file it opens
  try:
    trained, step = _run_and_step(c.checkpoint)
    source = _source(trained)
    policy = architectures.read_policy(source, dtype="float32")
    text = tokenizer.Tokenizer(source)
    mesh = sharding.make_mesh(data=-1, model=1)  # wherever it was trained
    abstract = jax.eval_shape(policy.init, jax.random.key(0))
    like = jax.tree.map(
      lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
      abstract,
      sharding.param_shardings(abstract, mesh),
    )
    step, params = checkpoints.read_params(trained / "checkpoints", step, like)
    fields = architectures.read_json(source / "config.json")
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    workdir.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: nothing that is there is overwritten or removed.
    part = pathlib.Path(
      tempfile.mkdtemp(prefix=f".{workdir.name}.", dir=workdir.parent)
    )
    hf.save(part, policy, params, dtype=dtype, source=source)
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  generation = part / "generation_config.json"
  if not generation.exists():  # or transformers would not stop
    ids = {"eos_token_id": list(text.stop_ids), "pad_token_id": text.pad_id}
    generation.write_text(json.dumps(ids, indent=2) + "\n")
  part.chmod(0o755)  # mkdtemp lets nobody else in
  part.replace(workdir)  # which is empty, or not there
  print(f"wrote step {step} of {trained} to {workdir}, {dtype}")


def _run_and_step(checkpoint: str) -> tuple[pathlib.Path, int | None]:
  path = pathlib.Path(checkpoint or ".").absolute()
  if path.parent.name == "checkpoints" and path.name.isdigit():
    return path.parents[1], int(path.name)
  if not checkpoint or not (path / "checkpoints").is_dir():
    raise ValueError(
      f"config.checkpoint = {checkpoint!r} is not the folder of a run, nor one "
      "of its checkpoints, as runs/n512 or runs/n512/checkpoints/60"
    )
  return path, None


def _source(trained: pathlib.Path) -> pathlib.Path:
  """The Hugging Face directory that a run began with."""
  path = trained / "config.json"
  try:
    checkpoint = architectures.read_json(path)["config"]["checkpoint"]
  except (KeyError, TypeError):
    raise ValueError(f"{path} is not that of a run") from None
  try:
    return hf.locate(checkpoint) if checkpoint else ASSETS
  except ValueError as e:
    raise ValueError(f"{path}: the run began with {e}") from None
