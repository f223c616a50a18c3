"""--mode=export: writes a run's policy as a Hugging Face directory."""

import functools
import json
import pathlib
import tempfile
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from brorl_jax.config.run import PolicyConfig
from brorl_jax.errors import as_user_error
from brorl_jax.many import meshes
from brorl_jax.model import adapters, architectures, huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.plan import checkpoint_source
from brorl_jax.runs import folder


@as_user_error(ValueError)
def run(c: PolicyConfig, workdir: pathlib.Path) -> None:
  """Writes the policy of a run or one of its checkpoints to `workdir`, in the
  dtype of the model that the run started from. An adapter is merged, and once
  more by itself in `adapter`, for PEFT.
  """
  folder.check_empty(workdir)
  which = checkpoint_source.find_run(c.checkpoint)
  if which is None:
    raise ValueError(
      f"config.policy.checkpoint = {c.checkpoint!r} is not a run; give the "
      "folder of a run or one of its checkpoints, such as runs/n512 or "
      "runs/n512/checkpoints/60"
    )
  starts = [one._asdict() for one in checkpoint_source.starts(which)]
  text = checkpoint_source.read_tokenizer(which, c.chat_template)
  mesh = meshes.make_mesh()  # on any machine
  found = checkpoint_source.load_run(which, mesh, dtype="float32")
  policy, params, step = found
  # An evaluation compares its held-out prompts with this.
  record = json.dumps({"starts": starts}, indent=2) + "\n"
  also = {checkpoint_source.TRAINED_ON: record}
  base = checkpoint_source.checkpoint(which)
  how = {"source": which.source, "text": text, "also": also, "base": base}
  dtype = write(workdir, policy, params, **how)
  print(f"wrote step {step} of {which.run} to {workdir}, {dtype}")


def write(
  workdir: pathlib.Path,
  policy: Policy,
  params: PyTree,
  *,
  source: pathlib.Path,
  text: tokenizer.Tokenizer,
  also: Mapping[str, str],
  base: str = "",
) -> str:
  """Writes a directory that runs and transformers can load; returns its dtype.

  The policy started from `source`, which says the dtype. `also` are more files,
  text by name; `base` is the name of what an adapter belongs to. Raises
  ValueError if config.json cannot express the policy.
  """
  fields = architectures.read_json(source / "config.json")
  dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
  workdir.parent.mkdir(parents=True, exist_ok=True)
  # A temporary folder, so that nothing is overwritten or removed.
  prefix = f".{workdir.name}."
  part = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=workdir.parent))
  if policy.lora_rank:
    huggingface.save_adapter(part / "adapter", policy, params, base=base)
    params = jax.jit(functools.partial(adapters.merged, policy))(params)
    policy = adapters.alone(policy)
  huggingface.save(part, policy, params, dtype=dtype, source=source)
  generation = part / "generation_config.json"
  if not generation.exists():  # otherwise transformers would not stop
    ids = {"eos_token_id": list(text.stop_ids), "pad_token_id": text.pad_id}
    generation.write_text(json.dumps(ids, indent=2) + "\n")
  if (template := text.template) is not None:
    (part / "chat_template.jinja").write_text(template.text, encoding="utf-8")
  for name, content in also.items():
    (part / name).write_text(content)
  part.chmod(0o755)  # mkdtemp gives access to the owner only
  part.replace(workdir)  # empty or missing
  return dtype
