"""Hugging Face transformers' generate(); see launch/bench/protocol.py."""

import pathlib
import sys

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))

from launch.bench import protocol


def model_of(task):
  """A Qwen2 of random float32 weights; nothing ends its text."""
  import transformers

  shape, workload = task.workload.model, task.workload
  config = transformers.Qwen2Config(
    vocab_size=shape.vocab,
    hidden_size=shape.width,
    intermediate_size=shape.mlp,
    num_hidden_layers=shape.layers,
    num_attention_heads=shape.heads,
    num_key_value_heads=shape.kv_heads,
    tie_word_embeddings=shape.tied,
    max_position_embeddings=workload.prompt + workload.new,
    rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    rms_norm_eps=shape.norm_eps,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
  )
  return transformers.Qwen2ForCausalLM(config)


def start(task):
  if task.workload.lengths:
    sys.exit("error: responses end where one token is drawn: use --ends")
  import numpy
  import torch
  import transformers

  torch.set_num_threads(task.threads)
  torch.manual_seed(0)
  workload = task.workload
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = model_of(task).to(device, getattr(torch, task.dtype)).eval()
  prompts = torch.tensor(task.prompts, device=device)
  task.idle()
  generation = transformers.GenerationConfig(
    max_new_tokens=workload.new,
    num_return_sequences=task.n,
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    pad_token_id=0,
    eos_token_id=list(workload.stop_ids) or None,
  )

  def run(seed):
    torch.manual_seed(seed)
    with torch.inference_mode():
      out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=generation,
      )
    # Narrower than `new` where everything ended before.
    return out[:, workload.prompt :].tolist()

  versions = {"torch": torch.__version__, "numpy": numpy.__version__}
  return f"transformers {transformers.__version__}", versions, run


if __name__ == "__main__":
  protocol.main(start)
