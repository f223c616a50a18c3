"""An update as a plain loop over torch; see launch/bench/protocol.py.

What a trainer does without: the prompt is read for every response, all logits
are kept, no response is packed. Responses are random, of the workload's
lengths; only the update is measured.
"""

import pathlib
import sys

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))

from launch.bench import protocol
from third_party.peers.transformers import run as of_transformers

_MICRO = 16  # responses of a pass; 8, 32 and 64 are not faster


def start(task):
  import numpy
  import torch

  torch.set_num_threads(task.threads)
  torch.manual_seed(0)
  w = task.workload
  model = of_transformers.model_of(task).train()
  half = torch.autocast("cpu", torch.bfloat16, task.dtype == "bfloat16")
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0
  )
  task.idle()

  def microbatch(prompt, rows, lengths, advantage, total):
    rows = rows[:, : int(lengths.max())]
    tokens = torch.cat([prompt.expand(len(rows), -1), rows], dim=1)
    with half:
      logits = (
        model(tokens, logits_to_keep=rows.shape[1] + 1).logits[:, :-1].float()
      )
    logp = torch.log_softmax(logits, dim=-1)
    logp = logp.gather(2, rows[..., None])[..., 0]
    ratio = torch.exp(logp - logp.detach())
    clipped = ratio.clamp(0.8, 1.28)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    counts = torch.arange(rows.shape[1])[None] < lengths[:, None]
    (-(gain * counts).sum() / total).backward()

  def run(seed):
    lengths = w.drawn(task.n * len(task.prompts), seed)
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(
      10, w.model.vocab, (len(lengths), w.new), generator=random
    )
    clock = protocol.Clock()
    with clock:
      optimizer.zero_grad()
      for p, prompt in enumerate(torch.tensor(task.prompts)):
        own = slice(p * task.n, (p + 1) * task.n)
        reward = (rows[own, 0] % 2).float()
        advantage = (reward - reward.mean())[:, None]
        of_prompt = rows[own], torch.tensor(lengths[own]), advantage
        for parts in zip(*(x.split(_MICRO) for x in of_prompt), strict=True):
          microbatch(prompt[None], *parts, sum(lengths))
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
    task.parts = {"update_wall_s": clock.wall_s, "update_cpu_s": clock.cpu_s}
    flat = rows.tolist()
    return [row[:n] for row, n in zip(flat, lengths, strict=True)]

  versions = {"numpy": numpy.__version__}
  return f"torch {torch.__version__}", versions, run


if __name__ == "__main__":
  protocol.main(start, default="l1")
