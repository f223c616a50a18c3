"""A run's policy as a Hugging Face directory."""

import json
import pathlib
import tempfile

from absl import logging

from brorl_jax import architectures, hf, sharding, tokenizer
from brorl_jax.main import folder, settings, trained
from brorl_jax.main.settings import Config


def run(c: Config, workdir: pathlib.Path) -> None:
  """Writes what `config.checkpoint` holds to `workdir`.

  `config.checkpoint` is the folder of a run, or one step of it:
  runs/n512/checkpoints/60. Weights get the dtype that the run began with.
  """
  folder.check_empty(workdir)
  logging.set_verbosity(logging.ERROR)  # orbax tells of every file it opens
  try:
    which = _of_a_run(c.checkpoint)
    starts = [one._asdict() for one in trained.starts(which)]
    text = tokenizer.Tokenizer(which.source)
    mesh = sharding.make_mesh(data=-1, model=1)  # wherever it was trained
    policy, params, step = trained.load(which, mesh, dtype="float32")
    fields = architectures.read_json(which.source / "config.json")
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    workdir.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: nothing that is there is overwritten or removed.
    part = pathlib.Path(
      tempfile.mkdtemp(prefix=f".{workdir.name}.", dir=workdir.parent)
    )
    hf.save(part, policy, params, dtype=dtype, source=which.source)
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  generation = part / "generation_config.json"
  if not generation.exists():  # or transformers would not stop
    ids = {"eos_token_id": list(text.stop_ids), "pad_token_id": text.pad_id}
    generation.write_text(json.dumps(ids, indent=2) + "\n")
  # So that an evaluation knows what must not be held out from it.
  told = json.dumps({"starts": starts}, indent=2)
  (part / trained.TRAINED_ON).write_text(told + "\n")
  part.chmod(0o755)  # mkdtemp lets nobody else in
  part.replace(workdir)  # which is empty, or not there
  print(f"wrote step {step} of {which.run} to {workdir}, {dtype}")


def _of_a_run(checkpoint: str) -> trained.Trained:
  found = trained.of_a_run(checkpoint)
  if found is None:
    raise ValueError(
      f"config.checkpoint = {checkpoint!r} is not the folder of a run, nor one "
      "of its checkpoints, as runs/n512 or runs/n512/checkpoints/60"
    )
  return found
