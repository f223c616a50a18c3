"""A step of Hugging Face TRL's GRPOTrainer; see launch/bench/protocol.py."""

import os
import pathlib
import sys
import tempfile

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from launch.bench import protocol
from third_party.peers.transformers import run as of_transformers

# Responses of a forward and backward pass; with 512 memory would be the limit.
_MICRO = 64


def start(task):
  if task.workload.stop_ids or len(task.prompts) > 1:
    sys.exit(
      "error: trl trains whole responses to one prompt here: give no --ends, "
      "no --lengths and --prompts=1"
    )
  import numpy
  import torch
  import transformers
  import trl

  torch.set_num_threads(task.threads)
  torch.manual_seed(0)
  model = of_transformers.model_of(task)
  model.config.eos_token_id, model.config.pad_token_id = 1, 0
  task.idle()
  trainer = protocol.Trainer(lambda held: _train(task, model, held))

  def run(seed):
    rows, generating, step = trainer.step()
    task.parts = {
      "update_wall_s": step.wall_s - generating.wall_s,
      "update_cpu_s": step.cpu_s - generating.cpu_s,
    }
    return rows

  versions = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "numpy": numpy.__version__,
  }
  return f"trl {trl.__version__}", versions, run


def _train(task, model, held):
  """Runs for ever; whoever holds it lets it take a step."""
  import datasets
  import transformers
  import trl

  rows, clocks = [], {}

  def reward(completion_ids, **_):
    rows[:] = [[int(t) for t in row] for row in completion_ids]
    return [float(row[0] % 2) for row in rows]

  class Turns(transformers.TrainerCallback):
    def on_step_begin(self, *_, **__):
      held.wait()
      clocks.update(generating=protocol.Clock(), step=protocol.Clock())
      clocks["step"].__enter__()

    def on_step_end(self, *_, **__):
      clocks["step"].__exit__()
      held.done((list(rows), clocks["generating"], clocks["step"]))

  class Trainer(trl.GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
      with clocks["generating"]:
        return super()._generate_single_turn(*args, **kwargs)

  micro = min(_MICRO, task.n)
  config = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16=task.dtype == "bfloat16",  # autocast; weights stay float32
    num_generations=task.n,
    per_device_train_batch_size=micro,
    gradient_accumulation_steps=task.n // micro,
    max_completion_length=task.workload.new,
    generation_kwargs={"min_new_tokens": task.workload.new},
    temperature=1.0,
    beta=0.0,
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=0.28,
    scale_rewards="batch",
    learning_rate=1e-5,
    lr_scheduler_type="constant",
    max_steps=10**6,
    gradient_checkpointing=False,  # its default, which is slower
    shuffle_dataset=False,
    dataloader_pin_memory=False,
    report_to=[],
    logging_steps=10**6,
    save_strategy="no",
    disable_tqdm=True,
    seed=0,
  )
  text = " ".join(f"w{max(2, token)}" for token in task.prompts[0])
  Trainer(
    model=model,
    reward_funcs=reward,
    args=config,
    train_dataset=datasets.Dataset.from_list([{"prompt": text}] * 64),
    processing_class=_tokenizer(task.workload.model.vocab),
    callbacks=[Turns()],
  ).train()


def _tokenizer(vocab):
  """A word for each token."""
  import tokenizers
  import transformers

  words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocab)}}
  model = tokenizers.models.WordLevel(words, unk_token="<pad>")
  inner = tokenizers.Tokenizer(model)
  inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner,
    pad_token="<pad>",
    eos_token="<eos>",
    padding_side="left",
  )


if __name__ == "__main__":
  protocol.main(start, default="l1")
