"""Tests of brorl_jax/main/export.py: what is refused.

What a run leaves is exported in end_to_end_test.
"""

import pytest

EXPORT = ("--mode=export", "--config=configs/smoke.py")


@pytest.mark.parametrize("checkpoint", ["", "nowhere"])
def test_an_export_of_nothing_is_refused(failed, tmp_path, checkpoint):
  given = f"--config.policy.checkpoint={checkpoint}"
  said = failed(*EXPORT, f"--workdir={tmp_path}/out", given)
  assert said.startswith(
    f"config.policy.checkpoint = {checkpoint!r} is not a run"
  )
  assert not (tmp_path / "out").exists()


def test_an_export_overwrites_nothing(failed, tmp_path):
  (tmp_path / "mine").write_text("")
  given = f"--config.policy.checkpoint={tmp_path}"
  said = failed(*EXPORT, f"--workdir={tmp_path}", given)
  assert f"{tmp_path} is not empty" in said
  assert [p.name for p in tmp_path.iterdir()] == ["mine"]
