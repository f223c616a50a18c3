"""The learning rate for another batch size."""

import math


def sqrt_scaled(lr: float, *, samples: int, base_samples: int) -> float:
  """The square-root rule: lr * sqrt(samples / base_samples).

  The paper does not say what its batch size B counts. Both counts may be
  samples or prompts of an update, as long as they are the same thing. It
  matters: from 512 prompts x 16 rollouts to 128 x 512 the samples grow 8 times,
  which gives 2.83 lr, and the prompts fall to a quarter, which gives lr / 2.

  `samples` are those of an update after dynamic sampling, `base_samples` those
  for which `lr` was tuned. ValueError if one is not positive. Source: Hu et al.
  2025 (BroRL), arXiv:2510.01180, section 3: eta_new = eta_0 sqrt(B_new / B_0).

  >>> sqrt_scaled(1e-6, samples=128 * 512, base_samples=128 * 128)
  2e-06
  """
  for name, count in (("samples", samples), ("base_samples", base_samples)):
    if count <= 0:
      raise ValueError(f"{name} = {count} is not positive")
  return lr * math.sqrt(samples / base_samples)
