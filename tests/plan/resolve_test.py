"""Tests of brorl_jax/plan/resolve.py: what a config and a machine decide."""

import dataclasses
import datetime
import functools
import re
import shutil
from types import SimpleNamespace

import configured
import hub_configs
import jax
import jax.numpy as jnp
import numpy as np
import one_step
import pytest
from messages import refuses
from one_step import resolved

from brorl_jax import config
from brorl_jax.configs import n512
from brorl_jax.errors import UserError
from brorl_jax.learner import state as states
from brorl_jax.learner.objective import Correction, Objective
from brorl_jax.learner.packing import Layout
from brorl_jax.main import plan, settings, train
from brorl_jax.many import meshes
from brorl_jax.many.meshes import ONE
from brorl_jax.model import huggingface, spec, tokenizer
from brorl_jax.model.spec import Target
from brorl_jax.plan import resolve
from brorl_jax.plan.resolve import Machine
from brorl_jax.plan.topology import Name, Topology
from brorl_jax.rl import advantages, losses
from brorl_jax.runs import folder

CPU, GPU, TPU = (Target(kind, 8, 2**36) for kind in ("cpu", "gpu", "tpu"))


def auto(**fields):
  return one_step.config(dtype="auto", **fields)


def described(at: Target) -> Machine:
  return Machine(ONE, at)


def sizes_of(this):
  return [(p.config, p.layout, p.memory, p.objective) for p in this.phases]


def functions_of(**fields):
  return resolve.phase_functions(0, configured.config(**fields).phases[0])


# As a user's file has them.
OWN = """
import jax.numpy as jnp

def loss(logp, logp_old, advantage, mask, *, clip_high):
  ratio = jnp.exp(logp - logp_old)
  return -jnp.minimum(ratio, 1 + clip_high) * advantage[:, None]

def of_sequences(logp, logp_old, advantage, mask):
  return -advantage * jnp.sum(logp, axis=1, where=mask)

def advantage(reward, valid, length):
  return reward - 0.5

def keep(reward, valid):
  return reward.mean(axis=1) < 0.9

def scalar(*args, **options):
  return 0.0
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(OWN)
  return path


def test_a_name_of_a_table_is_its_value():
  for name, value in losses.LOSSES.items():
    made = functions_of(loss=name)
    assert made.objective.loss is value and made.digests == {}
  for name, value in advantages.ADVANTAGES.items():
    kind = name + ":4" * (name == "pass_at_k")
    found = functions_of(advantage=kind).advantage
    assert getattr(found, "func", found) is value
  for name, value in advantages.KEEP.items():
    assert functions_of(keep=name).keep is value


def test_an_advantage_gets_the_numbers_of_its_kind():
  reward = jnp.float32([[1, 0, 0, 0, 0, 0]])
  credit = functions_of(advantage="pass_at_k:2").advantage
  got = credit(reward, jnp.ones_like(reward, bool), jnp.ones_like(reward))
  np.testing.assert_array_equal(got, advantages.pass_at_k(reward, k=2))


@pytest.mark.parametrize("changes, correction", [
  ({"correction": "none"}, None), ({}, Correction("truncated", 0.0, 2.0)),
  ({"correction_range": (0, 3)}, Correction("truncated", 0.0, 3.0)),
  ({"correction": "banded"}, Correction("banded", 0.5, 5.0)),
  ({"correction": "sequence"}, Correction("sequence", 0.999, 1.002)),
])  # fmt: skip
def test_the_config_becomes_constants_of_the_loss(changes, correction):
  assert functions_of(entropy_weight=0.1, **changes).objective == Objective(
    clip_low=0.2, clip_high=0.28, kl_weight=1e-4, kl_clamp=10.0,
    temperature=1.0, entropy_weight=0.1, correction=correction)  # fmt: skip


def test_the_optimizer_has_every_number_of_the_config():
  how = dict(lr=0.1, warmup=2, b1=0.4, b2=0.45, eps=1e-8, weight_decay=0.3,
    max_grad_norm=1.5)  # fmt: skip

  def moved(tx):
    params = {"w": jnp.array([1e-4, 2.0, 3.0])}  # eps decides the first
    state = tx.init(params)
    for _ in range(3):
      step, state = tx.update({"w": params["w"] ** 2}, state, params)
      params = jax.tree.map(jnp.add, params, step)
    return params["w"]

  given = {k: v for k, v in how.items() if k not in ("b1", "b2", "eps")}
  tx, _ = resolve.optimizer(configured.config(**given, betas=(0.4, 0.45)))
  np.testing.assert_array_equal(moved(tx), moved(states.adamw(**how)[0]))
  for name in how:  # or it could not be missed
    other, _ = states.adamw(**how | {name: 2 * how[name]})
    assert np.any(moved(other) != moved(tx)), name


@pytest.mark.parametrize("base, factor", [(0, 1.0), (16, 2.0)])
def test_the_rate_grows_with_the_root_of_a_count(base, factor):
  c = one_step.config(lr=0.01, warmup=2, lr_samples=base)  # 64 samples
  assert resolve.scaled_lr(c) == pytest.approx(0.01 * factor)
  rates = [resolve.optimizer(c)[1](i) for i in range(3)]
  np.testing.assert_allclose(rates, np.array([0.5, 1, 1]) * 0.01 * factor, 1e-6)


def test_an_own_function_is_found_and_its_file_is_told(file):
  fields = {"loss.kind": "loss", "advantage.kind": "advantage"}
  fields |= {"filter.keep": "keep"}
  names = {field: f"{file}:{name}" for field, name in fields.items()}
  made = functions_of(**names)
  loss = made.objective.loss
  assert (loss.unit, loss.options) == ("token", ("clip_high",))
  assert (made.advantage.__name__, made.keep.__name__) == ("advantage", "keep")
  assert {k: v["name"] for k, v in made.digests.items()} == names
  (digest,) = {f["digest"] for f in made.digests.values()}
  assert re.fullmatch("[0-9a-f]{32}", digest)


def test_a_phase_has_functions_of_its_own(file):
  mine = f"{file}:loss"
  changes = {"from_step": 3, "loss.kind": mine}, {"from_step": 5, "optim.lr": 1}
  this = resolved(phases=changes)
  (told,) = this.functions.items()
  assert told[0] == "run.phases[0]['loss.kind']" and told[1]["name"] == mine
  takes = [phase.objective.loss.options for phase in this.phases]
  assert takes == [losses.OPTIONS, ("clip_high",), ("clip_high",)]


@pytest.mark.parametrize(
  "field", ["loss.kind", "advantage.kind", "filter.keep"]
)
@pytest.mark.parametrize("name, line", [
  ("ppoo", "'ppoo': unknown"),
  ("{file}:nothing", "mine.py ... function 'nothing'"),
  ("nowhere.py:f", "nowhere.py does not exist"),
  ("{file}:scalar", "mine.py:scalar': returns float32[] for"),
])  # fmt: skip
def test_what_is_no_function_is_refused_by_its_field(file, field, name, line):
  with refuses(ValueError, f"config.{field} = ... {line}"):
    functions_of(**{field: name.format(file=file)})


@pytest.mark.parametrize("name", ["gspo", "{file}:of_sequences"])
def test_a_loss_of_sequences_has_no_mean_over_a_constant(file, name):
  name = name.format(file=file)
  with refuses(ValueError, f"loss.mean = 'constant' ... loss.kind = '{name}'"):
    functions_of(loss=name, mean="constant")
  later = {"from_step": 9, "loss.kind": name, "loss.mean": "constant"}
  with refuses(UserError, "phase from step 9 ... loss.mean = 'constant'"):
    resolved(phases=(later,))


def test_a_loss_without_a_dual_clip_refuses_one(file):
  assert functions_of(dual_clip=3.0).objective.dual_clip == 3.0
  for name in ("gspo", "reinforce", f"{file}:of_sequences"):
    with refuses(ValueError, f"dual_clip = 3 must be 0 ... kind = '{name}'"):
      functions_of(loss=name, dual_clip=3.0)


def test_a_changed_file_is_refused_by_name():
  of = lambda name, digest: {"loss.kind": {"name": name, "digest": digest * 32}}
  before, other = of("mine.py:loss", "a"), of("mine.py:loss", "b")
  for now in (before, of("yours.py:loss", "b"), {}):
    resolve.refuse_changes(before, now)
  for none in (None, {}):
    resolve.refuse_changes(none, other)
  changed = "config.loss.kind = 'mine.py:loss' ... mine.py was changed"
  with refuses(ValueError, f"{changed} ... {'a' * 32} ... {'b' * 32}"):
    resolve.refuse_changes(before, other)


LATER = ({"from_step": 3, "optim.lr": 0.5, "loss.kind": "gspo"}, {
  "from_step": 7, "advantage.kind": "maxrl", "filter.keep": "all",
  "loss.clip_high": 0.5, "reference.kl_weight": 0.25,
  "sampling.max_new_tokens": 5, "sampling.n": 8, "sampling.temperature": 0.5
})  # fmt: skip


def behaviour(phase):
  """What the functions of a phase do; functions cannot be compared."""
  reward = jnp.float32([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
  valid = jnp.ones_like(reward, bool)
  length = 1 + jnp.arange(12.0).reshape(3, 4)
  params = {"w": jnp.arange(1.0, 4.0)}
  step, _ = phase.tx.update(params, phase.tx.init(params), params)
  return {"advantage": phase.advantage(reward, valid, length),
    "keep": phase.keep(reward, valid),
    "tx": step["w"], "lr": [phase.lr(i) for i in (0, 3, 99)]}  # fmt: skip


def test_every_part_of_a_phase_follows_from_its_own_config():
  """Each is that of a run which begins with the values of the phase."""
  this = resolved(phases=LATER)
  assert [p.since for p in this.phases] == [1, 3, 7]
  assert [p.changed for p in this.phases] == [
    None,
    *({k: v for k, v in x.items() if k != "from_step"} for x in LATER),
  ]
  values, seen = {}, []
  for phase, change in zip(this.phases, ({}, *LATER), strict=True):
    values |= {k: v for k, v in change.items() if k != "from_step"}
    (alone,) = resolved(**values).phases
    told = dataclasses.replace(phase.config, run=alone.config.run)
    assert told == alone.config
    for name in ("trainer", "objective", "layout", "memory"):
      assert getattr(phase, name) == getattr(alone, name), name
    assert phase.mass.temperature == alone.mass.temperature
    got, want = behaviour(phase), behaviour(alone)
    for name in want:
      np.testing.assert_array_equal(got[name], want[name], name)
    seen.append(got)
  first, second, third = this.phases
  assert second.objective.loss is losses.LOSSES["gspo"]
  assert (third.objective.clip_high, third.objective.kl_weight) == (0.5, 0.25)
  assert third.objective.temperature == third.mass.temperature == 0.5
  assert (first.layout.length, third.layout.length) == (6, 5)
  assert first.memory.update.tokens == 6 and third.memory.update.tokens == 5
  assert second.lr(99) == 0.5 and first.lr(99) == one_step.config().optim.lr
  for name, (before, after) in {
    "advantage": (1, 2), "keep": (1, 2), "tx": (0, 1), "lr": (0, 1),
  }.items():  # fmt: skip
    assert np.any(seen[before][name] != seen[after][name]), name


def test_options_of_the_policy_go_to_where_they_count():
  this = resolved(int8_cache=True, remat="products", blocks=6, rows=5)
  (phase,) = this.phases
  decoder = phase.memory.rollouts.load.policy
  assert decoder == dataclasses.replace(this.policy, int8_cache=True)
  assert phase.trainer == dataclasses.replace(
    this.policy, remat="products", mesh=this.mesh
  )
  assert phase.mass.response_logp.__self__ == dataclasses.replace(
    this.policy, remat="layer", mesh=this.mesh
  )
  assert phase.layout == Layout(5, 6, 6, 40, 1)
  two = resolve.resolve(one_step.config(blocks=6), one_step.machine(2))
  assert two.phases[0].layout == Layout(8, 4, 6, 40, 2)  # all it has


def test_a_reference_of_any_phase_is_kept_from_the_start():
  kl = lambda weight, **how: {"reference.kl_weight": weight, **how}
  for first, later, kept in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)):
    it = resolved(kl_weight=0.1 * first, phases=(kl(0.1 * later, from_step=9),))
    assert it.keep_reference == bool(kept)
    for phase in it.phases:
      assert round(phase.memory.sampling_bytes / weights(it)) == 3 + kept


def weights(this):
  return sum(x.size * 4 for x in jax.tree.leaves(this.policy.shapes))


def test_this_machine_has_all_devices():
  here = resolve.here(configured.config(mesh_fsdp=-1, mesh_tensor=2).devices)
  assert here[:3] == (meshes.Axes(fsdp=4, tensor=2), spec.here(), 1)
  assert meshes.of(here.mesh) == here.axes
  with refuses(UserError, "fsdp=3 ... 8 devices"):
    resolve.here(configured.config(mesh_fsdp=3).devices)


@pytest.mark.parametrize("fields", [{}, {"memory_bytes": 10**9}])
def test_a_topology_like_this_machine_gives_the_same_sizes(fields):
  small = dict(in_flight=0, rows=0, blocks=0, samples=512, dtype="auto")
  later = {"from_step": 2, "optim.lr": 1.0}
  c = one_step.config(**small, **fields, phases=(later,))
  here = resolve.here(c.devices)
  where = Topology(Name("here"), jax.devices(), spec.here())
  want = resolve.resolve(c, here)
  for machine in (plan.machine(c.devices, at) for at in (where, None)):
    assert machine == here._replace(mesh=None)
    got = resolve.resolve(c, machine)
    assert sizes_of(got) == sizes_of(want)
    assert (got.policy, got.source) == (want.policy, want.source)
    assert got.phases[0].trainer.mesh is None
  assert want.phases[0].trainer.mesh is here.mesh


def test_the_config_tells_the_memory_of_a_device():
  for given, told in ((0, 2**36), (10**9, 10**9)):
    this = resolve.resolve(one_step.config(memory_bytes=given), described(CPU))
    assert this.policy.target == this.machine.target
    assert this.policy.target == dataclasses.replace(CPU, memory_bytes=told)
    (phase,) = this.phases
    assert phase.trainer.target == this.policy.target
    assert phase.memory.rollouts.load.policy.target == this.policy.target
    assert phase.memory.rollouts.memory_bytes == told
    assert phase.memory.heldout.memory_bytes == told


def test_a_run_keeps_the_memory_that_it_began_with(tmp_path):
  c = one_step.config(rows=0)
  at = lambda n: described(dataclasses.replace(CPU, memory_bytes=n))
  first = resolve.resolve(c, at(2**34), tmp_path)
  folder.write_config(config.as_dict(c), tmp_path, memory_bytes=2**34)
  for left in (2**27, 2**36):
    again = resolve.resolve(c, at(left), tmp_path)
    assert again.policy == first.policy and sizes_of(again) == sizes_of(first)
  told = one_step.config(rows=0, memory_bytes=2**33)
  again = resolve.resolve(told, at(2**36), tmp_path)
  assert again.policy.target.memory_bytes == 2**33


@pytest.mark.parametrize("rounds, n, rows, chunk", [
  ((), 512, 1, 512), ((), 512, 8, 32), ((), 512, 3, 128), ((), 512, 64, 32),
  ((), 96, 2, 32), ((), 16, 8, 16), ((16, 64, 512), 512, 8, 16),
  ((128, 512), 512, 2, 32),
])  # fmt: skip
def test_rollouts_of_a_prompt_lie_on_all_rows(rounds, n, rows, chunk):
  c = one_step.config(n=n, samples=2 * n, rounds=rounds)
  assert resolve.chunk_of(c.sampling, rows) == chunk


@pytest.mark.parametrize("rows, processes", [(1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("fields, most", [
  ({"n": 16, "samples": 64}, 4), ({"n": 16, "samples": 32 * 16}, 32),
  ({"n": 16, "samples": 2**14}, 256),  # 4,096 in flight
  ({"n": 64, "samples": 256, "rounds": (16, 64)}, 4 * 3),
  ({"n": 512, "samples": 1024, "rounds": (16, 64, 512)}, 2 * 28),
])  # fmt: skip
def test_no_more_prompts_are_in_flight_than_a_step_needs(
  fields, most, rows, processes
):
  c = one_step.config(**fields, in_flight=4096, blocks=rows)
  most = max(most, rows)
  this = resolve.resolve(c, Machine(meshes.Axes(fsdp=rows), CPU, processes))
  (phase,) = this.phases
  plan, chunk = phase.memory.rollouts, c.sampling.chunk
  assert phase.config.sampling.in_flight == most * chunk
  assert plan.load.n == chunk and plan.load.prompts == most // processes
  assert plan.lanes <= most
  # Held-out prompts are others.
  want = min(4096 // c.eval.n, 8 * c.eval.prompts) // processes
  assert phase.memory.heldout.load.prompts == want
  few = phase.memory.heldout.only(5)
  each = rows // processes
  assert (few.load.prompts, few.lanes) == (-(-5 // each) * each,) * 2
  assert few.total_bytes < phase.memory.heldout.total_bytes
  assert phase.memory.heldout.only(10**6) == phase.memory.heldout


def test_processes_share_the_devices_and_hold_a_copy_each():
  c = one_step.config(in_flight=128, blocks=4, samples=128)
  at = meshes.Axes(fsdp=4)
  one, two = (
    resolve.resolve(c, Machine(at, CPU, processes=count)).phases[0].memory
    for count in (1, 2)
  )
  assert (one.rollouts.lanes, two.rollouts.lanes) == (8, 4)
  assert (one.sampling_bytes, one.update) == (two.sampling_bytes, two.update)
  held = lambda plans: plans.rollouts.parts["training state"]
  whole = sum(x.size * 4 for x in jax.tree.leaves(
      resolve.resolve(c, described(CPU)).policy.shapes))  # fmt: skip
  assert held(one) == one.sampling_bytes
  assert held(two) - held(one) == pytest.approx(whole / 2, rel=0.01)
  assert two.heldout.parts["training state"] == held(two)


def test_an_evaluation_holds_parameters_alone(tmp_path):
  evaluation = lambda **fields: resolve.evaluation(
    one_step.config(**fields), one_step.machine(), tmp_path
  )
  this = evaluation(in_flight=0, eval_prompts=99, eval_n=256)
  assert this.heldout.load.prompts == 1
  assert this.heldout.parts["training state"] == weights(this)
  with refuses(UserError, "max_new_tokens = 33040"):
    evaluation(max_new_tokens=33000)
  with refuses(UserError, "evaluations ... memory_bytes"):
    evaluation(memory_bytes=1000)


@pytest.mark.parametrize("devices, fields, line", [
  (1, {"max_new_tokens": 32729},
   "config.data.prompt_tokens + sampling.max_new_tokens = 32769 ... at most "
   "32768"),
  (1, {"eval_max_new_tokens": 32729},
   "config.data.prompt_tokens + eval.max_new_tokens = 32769"),
  (1, {"memory_bytes": 10**6},
   "config.devices.memory_bytes ... rollouts of 16 x 6 tokens ... "
   "use larger devices"),
  (1, {"memory_bytes": 10**8, "max_new_tokens": 9000, "slots": 4},
   "optim.rows = 8 ... optim.blocks = 2 ... nearest that fits"),
  (3, {}, "3 groups of devices ... sampling.in_flight = 64 ... "
   "optim.blocks = 2 ... multiple of 3 ... 0 chooses"),
  (1, {"advantage": "none.py:f"}, "config.advantage.kind ... none.py"),
  (1, {"checkpoint": "/no/such"}, "'/no/such' ... give one"),
  (1, {"chat_template": "/no/such"}, "/no/such"),
  (1, {"phases": ({"from_step": 4, "sampling.max_new_tokens": 32729},)},
   "phase from step 4 ... max_new_tokens = 32769 ... at most 32768"),
  (1, {"phases": ({"from_step": 4, "loss.kind": "ppoo"},)},
   "phase from step 4 ... config.loss.kind = 'ppoo' ... did you mean ppo"),
  (1, {"advantage.kind": "rloo"}, "did you mean leave_one_out?"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
  monkeypatch, devices, fields, line
):
  """Nor are weights loaded."""
  fail = lambda *_, **__: pytest.fail("too late")
  monkeypatch.setattr(huggingface, "load", fail)
  monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
  with refuses(UserError, line):
    resolve.resolve(one_step.config(**fields), one_step.machine(devices))


@pytest.fixture
def bare(tmp_path):
  """A config of a model directory without a tokenizer."""
  shutil.copy(huggingface.ASSETS / "config.json", tmp_path)
  return functools.partial(one_step.config, checkpoint=str(tmp_path))


def test_a_plan_needs_no_tokenizer_but_a_run_does(bare):
  assert resolve.resolve(bare(), described(CPU)).tokenizer is None
  with refuses(UserError, "/no/such"):
    resolve.resolve(bare(chat_template="/no/such"), described(CPU))
  with refuses(UserError, "tokenizer"):
    resolved(bare())


def test_a_tokenizer_of_another_model_is_refused(bare, tmp_path):
  names = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"
  for name in names:
    shutil.copy(huggingface.ASSETS / name, tmp_path)
  text = (tmp_path / "config.json").read_text()
  few = text.replace('"vocab_size": 512', '"vocab_size": 256')
  assert few != text
  (tmp_path / "config.json").write_text(few)
  for machine in (described(CPU), one_step.machine()):
    with refuses(UserError, "id 511 ... 256 rows"):
      resolve.resolve(bare(), machine)


@pytest.mark.parametrize(
  "machine, dtype", [(CPU, "float32"), (GPU, "bfloat16"), (TPU, "bfloat16")]
)
def test_a_machine_decides_for_a_new_run(machine, dtype):
  this = resolve.resolve(auto(), described(machine))
  assert this.config.policy.dtype == this.policy.dtype == dtype


@pytest.fixture
def trains(monkeypatch, tmp_path):
  workdir = tmp_path / "run"

  def hold(this, workdir, parts, changed, *_):
    workdir.mkdir(exist_ok=True)
    folder.write_config(config.as_dict(this.config), workdir)
    held.append(changed)
    return 1

  held = []
  silent = SimpleNamespace(log_lines=[], close=lambda: None, episodes=False)
  parts = SimpleNamespace(examples=silent, scorer=silent)
  monkeypatch.setattr(train, "_parts", lambda *_, **__: parts)
  monkeypatch.setattr(train, "_train", hold)

  def start(c, machine, *, begin_again=False, **how):
    goes_on = None if begin_again else workdir
    this = resolve.resolve(c, described(machine), goes_on)
    how = dict(allow_change=False, begin_again=begin_again) | how
    assert train.run(this, workdir, **how) == 1  # stopped after step 1
    dtype = this.config.policy.dtype
    (began, *_) = folder.configs(workdir)
    assert began["policy"]["dtype"] == dtype and held.pop() == {}
    assert {p.config.policy.dtype for p in this.phases} == {dtype}
    assert this.policy.dtype == this.phases[0].trainer.dtype == dtype
    return dtype

  return start


def test_a_run_goes_on_in_its_dtype_on_another_machine(trains):
  assert trains(auto(), GPU) == trains(auto(), CPU) == "bfloat16"
  assert trains(auto(), CPU, allow_change=True) == "bfloat16"
  assert trains(one_step.config(dtype="bfloat16"), CPU) == "bfloat16"
  with refuses(UserError, "policy.dtype = 'bfloat16'"):
    trains(one_step.config(dtype="float32"), CPU)
  assert trains(auto(), CPU, begin_again=True) == "float32"


@pytest.fixture
def evaluates(tmp_path):
  def dtype(**fields):
    this = resolve.evaluation(
      auto(**fields), one_step.machine(), tmp_path / "evaluation"
    )
    assert this.policy.dtype == this.config.policy.dtype
    return this.policy.dtype

  return dtype


def test_an_evaluation_has_the_dtype_of_the_run_or_its_own(evaluates, tmp_path):
  assert evaluates() == "float32"
  run, workdir = tmp_path / "run", tmp_path / "evaluation"
  (run / "checkpoints").mkdir(parents=True)
  began = config.as_dict(one_step.config(dtype="bfloat16"))
  data = {tokenizer.DATE: (day := "2026-01-05")}
  dated = "{{ messages[0].content }}{{ strftime_now('%d %B') }}"
  more = {"began_with": "", "data": data, "chat_template": dated}
  folder.write_config(began, run, **more)
  assert evaluates(checkpoint=str(run)) == "bfloat16"
  # So have its prompts the date, and those of a folder that resumes.
  c, machine = one_step.config(checkpoint=str(run)), one_step.machine()
  assert resolve.evaluation(c, machine, workdir).text.date == day
  (tmp_path / "t").write_text(dated)
  c = one_step.config(chat_template=str(tmp_path / "t"))
  for where, date in (run, day), (None, str(datetime.date.today())):
    assert resolve.resolve(c, machine, where).text.date == date
  workdir.mkdir()
  folder.write_config(began, workdir, mode="evaluate")
  assert evaluates() == "bfloat16"


def test_an_evaluation_goes_on_with_the_step_of_its_own_run(tmp_path):
  run, workdir = tmp_path / "run", tmp_path / "evaluation"
  (run / "checkpoints").mkdir(parents=True)
  workdir.mkdir()
  values = config.as_dict(one_step.config())
  folder.write_config(values, run, began_with="")
  c = one_step.config(checkpoint=str(run))
  for other, step in ((str(run), 7), ("/another", None)):
    evaluated = {"run": other, "step": 7}
    folder.write_config(values, workdir, mode="evaluate", evaluated=evaluated)
    this = resolve.evaluation(c, one_step.machine(), workdir)
    assert this.source.step == step


@pytest.mark.parametrize("fields, dtypes", [
  ({}, ("float32", "bfloat16")),
  ({"memory_bytes": 10**9, "mesh_fsdp": 16}, ("bfloat16", "float32")),
])  # fmt: skip
def test_a_plan_is_that_of_the_machine_it_is_for(capsys, fields, dtypes):
  small = dict(n=4, samples=64, in_flight=64, rows=1, blocks=16) | fields
  same, other = (one_step.config(dtype=x, **small) for x in dtypes)
  said = []
  for c in (auto(**small), same, other):
    plan.run(plan.resolved(c))
    said.append(capsys.readouterr().out)
  assert said[0] == said[1] != said[2]


def test_sixty_four_rollouts_of_a_language_model_fit_a_laptop(tmp_path):
  """Of SmolLM2-135M: 2.2 GB of parameters, moments and a gradient."""
  sizes = hub_configs.LLAMA31 | dict(hidden_size=576, intermediate_size=1536,
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True)  # fmt: skip
  hub_configs.written(tmp_path, sizes)
  c = n512.get_config("tiny")
  c.policy.checkpoint = str(tmp_path)
  c.sampling.n, c.sampling.samples = 16, 64
  machine = described(dataclasses.replace(CPU, memory_bytes=23 * 2**30))
  (phase,) = resolve.resolve(settings.typed(c), machine).phases
  plans = phase.memory
  assert plans.rollouts.total_bytes < 3e9 and plans.update.need < 4.5e9
  assert plans.heldout.only(32).total_bytes < 5e9
