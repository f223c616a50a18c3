"""vLLM, built for the CPU; see launch/bench/protocol.py."""

import os
import pathlib
import sys
import tempfile

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))

from launch.bench import protocol

# Tokens of a block of the cache. A prompt is shared in whole blocks without the
# one of its last token: at 128, the default here, prompts of 128 share nothing.
_BLOCK = 32


def start(task):
  os.environ.update(
    OMP_NUM_THREADS=str(task.threads),
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # no process of its own
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_HOST_IP="127.0.0.1",
    HF_HUB_OFFLINE="1",
  )
  import torch
  import transformers
  import vllm

  workload = task.workload
  with tempfile.TemporaryDirectory() as folder:
    _save(task, folder)
    task.idle()  # the engine makes its cache together with its weights
    engine = vllm.LLM(
      model=folder,
      skip_tokenizer_init=True,
      dtype=task.dtype,
      enforce_eager=True,
      max_model_len=workload.prompt + workload.new,
      max_num_seqs=task.slots * (len(task.prompts) if workload.lengths else 1),
      max_num_batched_tokens=max(2048, task.n),
      enable_prefix_caching=True,
      block_size=_BLOCK,
      num_gpu_blocks_override=_blocks(task),
      seed=0,
      disable_log_stats=True,
    )
  sampling = vllm.SamplingParams(
    n=task.n,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_tokens=workload.new,
    stop_token_ids=list(workload.stop_ids),
    ignore_eos=True,  # it has none; this is not about stop_token_ids
    detokenize=False,
  )
  prompts = [{"prompt_token_ids": ids} for ids in task.prompts]

  def cut(length):
    own = sampling.clone()
    own.n, own.max_tokens = 1, length
    return own

  def run(seed):
    # A seed in SamplingParams would draw row by row.
    torch.manual_seed(seed)
    # Otherwise prompts of an earlier run need no work.
    engine.reset_prefix_cache()
    if workload.lengths:  # a request for each response, which ends there
      lengths = workload.drawn(len(prompts) * task.n, seed)
      each = [prompt for prompt in prompts for _ in range(task.n)]
      how = [cut(length) for length in lengths]
      outputs = engine.generate(each, how, use_tqdm=False)
      return [output.outputs[0].token_ids for output in outputs]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [x.token_ids for output in outputs for x in output.outputs]

  versions = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
  }
  return f"vllm {vllm.__version__}", versions, run


def _blocks(task):
  """Of the cache: each prompt's are shared, each response has its own."""
  prompt = task.workload.prompt // _BLOCK
  # The prompt's last block is a response's own.
  response = -(-task.workload.new // _BLOCK) + 1
  # One block is never used.
  return 1 + len(task.prompts) * (prompt + task.slots * response)


def _save(task, folder):
  """Writes the model as vLLM reads it."""
  import torch
  import transformers

  torch.manual_seed(0)
  shape = task.workload.model
  config = transformers.Qwen2Config(
    vocab_size=shape.vocab,
    hidden_size=shape.width,
    intermediate_size=shape.mlp,
    num_hidden_layers=shape.layers,
    num_attention_heads=shape.heads,
    num_key_value_heads=shape.kv_heads,
    tie_word_embeddings=shape.tied,
    max_position_embeddings=task.workload.prompt + task.workload.new,
    rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    rms_norm_eps=shape.norm_eps,
    bos_token_id=None,
    eos_token_id=None,
  )
  transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
  protocol.main(start)
