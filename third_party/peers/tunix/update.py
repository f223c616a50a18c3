"""A step of Google Tunix's GRPO learner; see launch/bench/protocol.py."""

import importlib.metadata
import pathlib
import sys
import tempfile

# This runs in an environment without brorl_jax.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))

from launch.bench import protocol
from third_party.peers.tunix import run as of_sampler


def start(task):
  if task.workload.stop_ids or len(task.prompts) > 1:
    sys.exit(
      "error: tunix trains whole responses to one prompt here: give no --ends, "
      "no --lengths and --prompts=1"
    )
  import jax
  import jax.numpy as jnp
  import numpy as np

  mesh = jax.sharding.Mesh(
    np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp")
  )
  model = of_sampler.model_of(task.workload.model, jnp.dtype(task.dtype), mesh)
  jax.block_until_ready(model)
  task.idle()
  trainer = protocol.Trainer(lambda held: _train(task, model, mesh, held))

  def run(seed):
    rows, update = trainer.step()
    task.parts = {"update_wall_s": update.wall_s, "update_cpu_s": update.cpu_s}
    return rows

  names = ("jax", "jaxlib", "flax", "numpy")
  versions = {name: importlib.metadata.version(name) for name in names}
  return f"tunix {importlib.metadata.version('google-tunix')}", versions, run


def _train(task, model, mesh, held):
  """Runs for ever; whoever holds it lets it take a step."""
  import jax
  import numpy as np
  from flax import nnx
  from tunix.rl.grpo import grpo_learner

  cluster = _cluster(task, model, mesh)
  generate, update = cluster.generate, cluster.update_actor
  rows = []

  def generate_held(*args, **kwargs):
    held.wait()
    out = generate(*args, **kwargs)
    rows[:] = [np.asarray(row).tolist() for row in out.tokens]
    return out

  def update_told(*args, **kwargs):
    clock = protocol.Clock()
    with clock:
      out = update(*args, **kwargs)
      jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    held.done((list(rows), clock))
    return out

  def reward(prompts, completions, **_):
    return [float(int(text.split()[0]) % 2) for text in completions]

  cluster.generate, cluster.update_actor = generate_held, update_told
  config = grpo_learner.GRPOConfig(
    num_generations=task.n, num_iterations=1, beta=0.0, epsilon=0.2
  )
  learner = grpo_learner.GRPOLearner(cluster, config, reward_fns=reward)
  text = " ".join(map(str, task.prompts[0]))
  with mesh:
    learner.train([{"prompts": np.array([text])}] * 10**4)


def _cluster(task, model, mesh):
  import optax
  from tunix.rl import rl_cluster
  from tunix.rl.rollout import base_rollout
  from tunix.sft import metrics_logger

  w = task.workload
  role = rl_cluster.Role
  config = rl_cluster.ClusterConfig(
    role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
    rollout_engine="vanilla",
    offload_to_cpu=False,
    training_config=rl_cluster.RLTrainingConfig(
      actor_optimizer=optax.adamw(1e-5),
      eval_every_n_steps=10**6,
      max_steps=10**4,
      mini_batch_size=1,  # prompts
      train_micro_batch_size=1,
      metrics_logging_options=metrics_logger.MetricsLoggerOptions(
        log_dir=tempfile.mkdtemp(), flush_every_n_steps=10**6
      ),
    ),
    rollout_config=base_rollout.RolloutConfig(
      max_tokens_to_generate=w.new,
      max_prompt_length=w.prompt,
      kv_cache_size=w.prompt + w.new + 1,
      temperature=1.0,
      top_p=1.0,
      return_logprobs=True,
      eos_tokens=[w.model.vocab + 1],  # never drawn
    ),
  )
  return rl_cluster.RLCluster(
    actor=model,
    reference=None,
    tokenizer=of_sampler.Numbers(),
    cluster_config=config,
  )


if __name__ == "__main__":
  protocol.main(start, default="l1")
