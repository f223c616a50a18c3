"""Operations, bytes and seconds of programs, by arithmetic.

    seconds = max(operations / peak operations per second,
                  bytes / peak bytes per second) + links

is what no program on this chip can beat if nothing overlaps the links: the
roofline. XLA does not count what its kernels do, so this is counted from the
policy: products are 2 operations for each weight of a token, attention is
4 K for each query head and key.

References:
  Williams et al. 2009, "Roofline", CACM 52(4).
"""

import dataclasses
from collections.abc import Mapping

from brorl_jax.model.policy import Policy
from brorl_jax.plan.chips import Chip
from brorl_jax.plan.hlo import Collective

Number = int | float  # a mean, or a count that may be one


@dataclasses.dataclass(frozen=True)
class Work:
  """Of all devices together."""

  flops: Number
  bytes: Number

  def __add__(self, other: "Work") -> "Work":
    return Work(self.flops + other.flops, self.bytes + other.bytes)

  def times(self, n: Number) -> "Work":
    return Work(n * self.flops, n * self.bytes)


@dataclasses.dataclass(frozen=True)
class Counts:
  """What tokens cost a policy; `devices` hold a copy of its weights each.

  Args:
    copies: Rows of devices, each of which reads all weights.
  """

  policy: Policy
  copies: int

  @property
  def _layer(self) -> int:
    """Weights of a layer that a token meets."""
    p = self.policy
    attention = p.width * p.head_size * (2 * p.heads + 2 * p.kv_heads)
    fed = 3 * p.width * p.mlp * max(p.experts_per_token, 1)
    return attention + fed + p.width * p.experts

  @property
  def _head(self) -> int:
    return self.policy.width * self.policy.vocab

  @property
  def weights(self) -> int:
    """Numbers that a pass over many tokens reads: all experts."""
    p = self.policy
    more = 3 * p.width * p.mlp * (p.experts - max(p.experts_per_token, 1))
    return p.layers * (self._layer + max(more, 0)) + self._head

  @property
  def key_bytes(self) -> int:
    """Of the keys and values of a token, in all layers."""
    p = self.policy
    each = 2 * p.layers * p.kv_heads
    if p.int8_cache:
      return each * (p.head_size + 4)
    return each * p.head_size * self._half

  @property
  def _half(self) -> int:
    return 2 if self.policy.dtype != "float32" else 4

  def forward(self, tokens: Number, seen: Number, logits: Number) -> Work:
    """A pass over tokens that see `seen` keys each, with logits of some.

    Activations are read and written, some ten times their width in a layer.
    """
    p = self.policy
    attention = 4 * p.heads * p.head_size * seen * p.layers
    flops = tokens * (2 * p.layers * self._layer + attention)
    moved = tokens * p.layers * self._half * (10 * p.width + 3 * p.mlp)
    read = self.copies * self.weights * self._half
    return Work(flops + 2 * logits * self._head, moved + read)

  def gradient(self, tokens: Number, seen: Number, logits: Number) -> Work:
    """Forward, forward again where nothing was kept, and twice that back."""
    once = self.forward(tokens, seen, logits)
    again = self.forward(tokens, seen, 0)
    # Logits are computed once more in the backward pass, by tiles.
    back = once.times(2) + Work(2 * logits * self._head, 0)
    return once + again + back

  def step(
    self, rows: Number, lanes: Number, prompt: Number, own: Number
  ) -> Work:
    """A decode step: weights, each lane's prompt once, each row's own keys."""
    work = self.forward(rows, prompt + own, rows)
    keys = self.key_bytes * (lanes * prompt + rows * own)
    return work + Work(0, keys + 4 * rows * self.policy.vocab)

  def apply(self, parameters: int) -> Work:
    """AdamW: parameters, moments and gradients, read and written."""
    return Work(20 * parameters, 28 * parameters)


def seconds(
  work: Work, sent: Mapping[Collective, int], chip: Chip, devices: int
) -> float:
  """By the roofline; messages between hosts at the speed of those links.

  Args:
    work: Of all devices.
    sent: Messages of a device -> how often.
    devices: That share the work.
  """
  busy = max(work.flops / chip.flops, work.bytes / chip.bandwidth) / devices
  return busy + link_seconds(sent, chip)


def link_seconds(sent: Mapping[Collective, int], chip: Chip) -> float:
  """Of messages, one after the other, around a ring."""
  total = 0.0
  for message, count in sent.items():
    n = max(message.group, 2)
    # A reduction sends its numbers twice around; the result of reduce-scatter
    # is one of n parts; a permutation is one hop.
    share = {
      "all-reduce": 2 * (n - 1) / n,
      "reduce-scatter": n - 1.0,
      "collective-permute": 1.0,
    }
    moved = message.size_bytes * share.get(message.kind, (n - 1) / n)
    link = chip.link if n <= chip.joined else chip.between
    total += count * moved / link
  return total
