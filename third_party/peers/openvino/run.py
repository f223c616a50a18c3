"""OpenVINO GenAI's paged-attention pipeline; see launch/bench/protocol.py.

It reads a GGUF file, whose matrices have to be half precision.
"""

import importlib.metadata
import pathlib
import sys
import tempfile

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))

from launch.bench import protocol

_INITIAL_SCALE = 0.02
_BLOCK = 32  # tokens of a block of the cache, on a CPU


def start(task):
  import numpy as np
  import openvino
  import openvino_genai as genai

  workload = task.workload
  precision = {"float32": "f32", "bfloat16": "bf16"}[task.dtype]
  scheduler = genai.SchedulerConfig()
  # It takes fresh blocks while there are any: more would only be memory.
  scheduler.num_kv_blocks = _blocks(task)
  # Responses of one request run all at once, whatever this says; as requests
  # of their own they would take turns in slots, and cost more.
  scheduler.max_num_seqs = task.n
  scheduler.max_num_batched_tokens = max(2048, task.n)
  # From one run to the next; but each response of given length is a request.
  scheduler.enable_prefix_caching = bool(workload.lengths)
  with tempfile.TemporaryDirectory() as folder:
    path = str(pathlib.Path(folder) / "model.gguf")
    _save(task, path)
    task.idle()  # the pipeline makes its cache together with its weights
    how = {
      "INFERENCE_PRECISION_HINT": precision,
      "KV_CACHE_PRECISION": precision,
      "INFERENCE_NUM_THREADS": task.threads,
      "NUM_STREAMS": 1,
    }
    if workload.lengths:
      return _requests(task, path, scheduler, how)
    pipeline = genai.LLMPipeline(
      path, "CPU", ATTENTION_BACKEND="PA", scheduler_config=scheduler, **how
    )
  config = genai.GenerationConfig()
  config.max_new_tokens = workload.new
  config.num_return_sequences = task.n
  config.do_sample = True
  config.temperature = 1.0
  config.top_p = 1.0
  config.stop_token_ids = set(workload.stop_ids)
  config.ignore_eos = not workload.stop_ids  # stop_token_ids too
  ids = np.asarray(task.prompts, np.int64)
  prompts = genai.TokenizedInputs(
    openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
  )

  def run(seed):
    config.rng_seed = seed
    return pipeline.generate(prompts, config).tokens

  return *_versions(), run


def _requests(task, path, scheduler, how):
  """A request for each response, which ends at its length."""
  import numpy as np
  import openvino
  import openvino_genai as genai

  scheduler.max_num_seqs = task.n * len(task.prompts)
  pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", how)
  tensors = [openvino.Tensor(np.array([x], np.int64)) for x in task.prompts]

  def config(length, seed):
    out = genai.GenerationConfig()
    out.max_new_tokens, out.rng_seed = length, seed
    out.do_sample, out.temperature, out.top_p = True, 1.0, 1.0
    out.ignore_eos = True
    return out

  def run(seed):
    lengths = task.workload.drawn(len(tensors) * task.n, seed)
    given = [config(x, seed + i) for i, x in enumerate(lengths)]
    prompts = [tensor for tensor in tensors for _ in range(task.n)]
    out = pipeline.generate(prompts, given)
    return [x.m_generation_ids[0] for x in out]

  return *_versions(), run


def _versions():
  names = ("openvino", "openvino-tokenizers", "gguf", "numpy")
  versions = {name: importlib.metadata.version(name) for name in names}
  version = importlib.metadata.version("openvino-genai")
  return f"openvino {version}", versions


def _blocks(task):
  """Of the cache: each prompt's are shared, each response has its own."""
  prompt = -(-task.workload.prompt // _BLOCK)
  # One more: the prompt's last block, copied where a response goes on in it.
  response = -(-task.workload.new // _BLOCK) + 1
  return len(task.prompts) * (prompt + task.n * response)


def _save(task, path):
  """Writes the model, random."""
  import gguf
  import numpy as np

  shape = task.workload.model
  writer = gguf.GGUFWriter(path, "qwen2")
  writer.add_context_length(task.workload.prompt + task.workload.new)
  writer.add_embedding_length(shape.width)
  writer.add_block_count(shape.layers)
  writer.add_feed_forward_length(shape.mlp)
  writer.add_head_count(shape.heads)
  writer.add_head_count_kv(shape.kv_heads)
  writer.add_rope_dimension_count(shape.head_size)
  writer.add_rope_freq_base(shape.rope_theta)
  writer.add_layer_norm_rms_eps(shape.norm_eps)
  writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
  writer.add_vocab_size(shape.vocab)
  tokens, merges = _vocabulary(shape.vocab)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("qwen2")
  writer.add_token_list(tokens)
  writer.add_token_merges(merges)
  # It refuses a vocabulary without a control token. This one ends responses
  # anyway where any does.
  kinds = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (shape.vocab - 1)
  writer.add_token_types(kinds)
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(0)
  writer.add_pad_token_id(0)
  writer.add_add_bos_token(False)
  random = np.random.default_rng(0)

  def matrix(name, *size):
    values = _INITIAL_SCALE * random.standard_normal(size, np.float32)
    writer.add_tensor(f"{name}.weight", values.astype(np.float16))

  def vector(name, size, value):
    writer.add_tensor(name, np.full(size, value, np.float32))

  queries, keys = (n * shape.head_size for n in (shape.heads, shape.kv_heads))
  matrix("token_embd", shape.vocab, shape.width)
  for i in range(shape.layers):
    block = f"blk.{i}"
    vector(f"{block}.attn_norm.weight", shape.width, 1)
    vector(f"{block}.ffn_norm.weight", shape.width, 1)
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
      matrix(f"{block}.attn_{name}", size, shape.width)
      vector(f"{block}.attn_{name}.bias", size, 0)
    matrix(f"{block}.attn_output", shape.width, queries)
    matrix(f"{block}.ffn_gate", shape.mlp, shape.width)
    matrix(f"{block}.ffn_up", shape.mlp, shape.width)
    matrix(f"{block}.ffn_down", shape.width, shape.mlp)
  vector("output_norm.weight", shape.width, 1)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _vocabulary(size):
  """Any byte-level one of that size: no text is ever read or written."""
  import itertools
  import string

  # Bytes as characters: printable ones as they are, the rest from 256 on.
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  spare = itertools.count(256)
  letters = [chr(b if b in printable else next(spare)) for b in range(256)]
  tokens, merges = list(letters), []
  pairs = itertools.product(string.ascii_letters, repeat=2)
  for a, b in itertools.islice(pairs, size - len(tokens)):
    tokens.append(a + b)
    merges.append(f"{a} {b}")
  return tokens, merges


if __name__ == "__main__":
  protocol.main(start)
