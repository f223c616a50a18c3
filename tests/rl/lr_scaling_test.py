"""Tests of brorl_jax/rl/lr_scaling.py."""

import pytest

from brorl_jax.rl.lr_scaling import sqrt_scaled


def test_by_hand():
  assert sqrt_scaled(3e-6, samples=400, base_samples=100) == 6e-6
  assert sqrt_scaled(3e-6, samples=100, base_samples=400) == 1.5e-6
  assert sqrt_scaled(3e-6, samples=7, base_samples=7) == 3e-6


def test_the_change_from_prorl_to_brorl():
  """128 x 512 are 65,536 samples, 512 x 16 are 8,192: sqrt(8) = 2.828."""
  by_sample = sqrt_scaled(1e-6, samples=128 * 512, base_samples=512 * 16)
  assert by_sample == pytest.approx(2.828e-6, rel=1e-3)
  assert sqrt_scaled(1e-6, samples=128, base_samples=512) == 5e-7


@pytest.mark.parametrize("name", ["samples", "base_samples"])
@pytest.mark.parametrize("count", [0, -8])
def test_says_which_count_is_wrong(name, count):
  counts = dict(samples=8, base_samples=8) | {name: count}
  with pytest.raises(ValueError, match=f"^{name} = {count} "):
    sqrt_scaled(1e-6, **counts)
