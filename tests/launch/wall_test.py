"""Tests of launch/wall: prompts, probabilities, statistics, tables."""

import collections
import pathlib
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import runs_for_tests as made
import scipy.stats
from absl import flags
from ml_collections import config_flags

from brorl_jax.configs import match, n16, n512, need
from brorl_jax.main import settings
from brorl_jax.model import huggingface, tokenizer
from launch.wall import arms, exact, first, language, report, run, study, tasks

ROOT = pathlib.Path(__file__).parents[2]
HARD = huggingface.locate("embedded:hard")
STORED = ROOT / "launch" / "wall" / "results.json"
SPOKEN = STORED.with_name("language_results.json")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_classes_have_the_share_of_right_demonstrations_that_they_aim_at(task):
  pairs = tasks.TASKS[task](count=80, seed=0)
  assert str(tasks.TASKS[task](count=80, seed=0)[3]) == str(pairs[3])
  wanted = collections.Counter(pair.wanted for pair in pairs)
  every = dict.fromkeys(tasks.CLASSES, 20)
  assert wanted == ({"hard": 80} if task == "countdown" else every)
  asked = [x.question for p in pairs for x in (p.train, p.heldout)]
  assert len(set(asked)) == 2 * len(pairs)
  for pair in pairs:
    low, high = tasks.CLASSES[pair.wanted]
    for one in (pair.train, pair.heldout):
      odds = one.odds / one.odds.sum()
      right = [said in set(one.right) for said in one.said]
      assert low <= odds[right].sum() <= high
      assert bool(one.right) == (pair.wanted != "impossible")


def test_countdown_is_right_in_any_order_of_the_numbers():
  for pair in tasks.countdown(count=40, seed=0):
    for one in (pair.train, pair.heldout):
      *numbers, arrow, target = one.question.split()
      assert arrow == "->"
      for said in one.right:
        assert eval(said) == int(target)
        assert sorted(said[::2]) == sorted(numbers)
      wrong = set(one.said) - set(one.right)
      assert all(eval(said) != int(target) for said in wrong)
    assert pair.train.right == pair.heldout.right


def test_the_first_hard_ones_are_taken():
  some = tasks.own(count=12, seed=0)
  p = [0.01 if pair.wanted in ("hard", "impossible") else 0.2 for pair in some]
  chosen = tasks.hard(some, p, count=2)
  assert chosen == [pair for pair in some if pair.wanted == "hard"][:2]
  with pytest.raises(ValueError, match=r"3 of 12 problems have p of 0\.001 to"):
    tasks.hard(some, p, count=4)


def test_probabilities_are_those_of_the_policy(monkeypatch):
  monkeypatch.setattr(exact, "_AT_ONCE", 2)  # of three prompts
  asked = {"a1.2": ["305", "7"], "bb": ["80"], "c3456": ["1"]}
  lines = [{"prompt": q, "right": right} for q, right in asked.items()]
  got = exact.pass_rates(HARD, lines)
  policy, params = huggingface.load(HARD)
  text = tokenizer.Tokenizer(HARD)
  for line, row in zip(lines, got, strict=True):
    ids = text.render([{"role": "user", "content": line["prompt"]}])
    prompt = jnp.array([ids])
    for said, p in zip(line["right"], row, strict=False):
      response = jnp.array([[[*text.encode(said), *text.stop_ids[:1]]]])
      each, _ = policy.response_logp(params, prompt, prompt >= 0, response)
      assert p == pytest.approx(float(jnp.exp(each.sum())), rel=1e-5)
      assert match.score(said, line) == 1.0 > match.score(f"{said} ", line)
  assert got[1, 1] == got[2, 1] == 0.0 < got.min(axis=1)[0]


def test_the_embedded_prompts_are_hard_for_the_embedded_policy():
  assert arms.folder_of("own", pathlib.Path("unused")) == HARD
  lines = exact.lines_of(HARD / "hard.jsonl")
  p = exact.pass_rates(HARD, lines).sum(axis=1)
  assert len(p) == 128 and 1e-3 <= p.min() and p.max() <= 3e-2
  twins = exact.lines_of(HARD / "heldout.jsonl")
  for line, twin in zip(lines, twins, strict=True):
    assert line["prompt"][:-1] == twin["prompt"][:-1] and line != twin
    assert line["right"] == twin["right"] and len(line["right"]) == 1


def typed(argv):
  holder, argv = flags.FlagValues(), ["", *argv]
  argv[1] = argv[1].replace("configs", str(ROOT / "configs"))
  config_flags.DEFINE_config_file("config", flag_values=holder, sys_argv=argv)
  holder(argv)
  return settings.training(holder.config)


@pytest.mark.parametrize("name", arms.ARMS)
def test_every_arm_is_a_config(name, tmp_path):
  arm = arms.ARMS[name]
  c = typed(arms.flags(arm, tmp_path, seed=3))
  got = c.run.seed, c.advantage.kind, c.run.max_samples, c.sampling.samples
  assert got == (3, arm.kind, arm.rollouts, arm.samples)
  last = c.phases[-1].config
  assert last.optim.lr == 2.0**arm.power
  assert c.optim.lr == 2.0 ** (-11.5 if arm.widen else arm.power)
  assert c.sampling.n == (16 if arm.widen else last.sampling.n)
  assert c.phases[-1].since == (arm.widen + 1 if arm.widen else 1)
  by_need = arm.n == "need"
  assert last.sampling.n == (512 if by_need else arm.n)
  assert last.sampling.rounds == ((16, 64, 256, 512) if by_need else ())


def test_every_arm_of_a_language_model_is_a_config():
  for name, arm in language.ARMS.items():
    c = typed(language.flags(arm, "here", seed=3))
    got = c.run.seed, c.sampling.n, c.sampling.samples // c.sampling.n
    n = 512 if "512" in name or "need" in name else 16
    assert got == (3, n, arm.prompts)
    assert c.sampling.rounds == ((64, 512) if name == "need" else ())
    assert (c.advantage.kind == "tokens") is ("whitened" in name)
    assert c.data.files == (str(language.PROMPTS),)
  assert report.FIRST.keys() == language.ARMS.keys()
  prompts = exact.lines_of(language.PROMPTS)
  p = np.array([one["right_of_2048"] for one in prompts]) / 2048
  assert len(p) > 50 and 1 / 512 <= p.min() and p.max() <= 1 / 16


def test_what_a_run_of_a_language_model_keeps(tmp_path, monkeypatch, capsys):
  """Responses to "1" are always right, to "3" the last of the second 512."""
  asked, loaded, change = [], [], monkeypatch.setattr

  def sample(spec, params, prompts, key):
    n, asks = spec.n, zip(prompts.tokens, prompts.mask, strict=True)
    ids = ["".join(map(chr, row[real])) for row, real in asks]
    assert (len(ids), spec.sampling.temperature) == (spec.lanes, 0.6)
    asked.append((len({*ids}), n))
    tokens = np.array([[[6 + (one == "1")]] * n for one in ids])
    second = asked[-4:].count((2, 512)) == 2
    for i, one in enumerate(ids):
      tokens[i, -1] = 7 if one == "3" and n == 512 and second else tokens[i, -1]
    return SimpleNamespace(tokens=tokens, mask=tokens > 0)

  text = SimpleNamespace(render=lambda x: [*map(ord, x[:80])], stop_ids=())
  text.decode = lambda rows: [str(row[0]) for row in rows]
  spoken = SimpleNamespace(policy=None, params=None, tokenizer=text, posed=str)
  known = {"answer": "7", "right_of_2048": 4}
  made.dump(tmp_path / "prompts", [{"prompt": x, **known} for x in "031"])
  change(language, "PROMPTS", tmp_path / "prompts")
  change(language.prefixes, "rollouts", sample)
  change(language, "RolloutSpec", SimpleNamespace)
  load = lambda where: loaded.append(str(where)) or spoken
  change(language.brorl_jax, "load", load)
  folder = tmp_path / "runs" / "n16-0"
  for step in ("0", "6"):
    (folder / "checkpoints" / step).mkdir(parents=True)
  about = {"machine": {"devices": ["cpu"], "processor": "P"}}
  made.dump(folder / "config.json", [about | {"versions": {"jax": "1"}}])
  line = lambda s: {"step": s, "time/busy_s": s, "data/samples_total": s}
  made.dump(folder / "metrics.jsonl", [line(s) for s in range(1, 8)])
  assert language.spent(folder) == 28
  change("sys.argv", ["x", str(tmp_path), "--policy=/base", "--arms=n16"])
  with pytest.raises(SystemExit, match=r"n16-0 failed; .*n16-0\.log ends"):
    change(run, "ROOT", tmp_path)  # no configs are there
    language.main()
  sys.argv.append("--cpu_s=28")  # it has spent as much
  language.main()
  assert loaded == ["/base", str(folder / "checkpoints" / "6")]
  more = [(3, 64), (2, 512), (2, 512), (1, 512), (1, 512)]
  assert asked == [*[(8, 8)] * 8, *more, *[(8, 8)] * 8]
  found = arms.read(tmp_path / "results")["n16"]["0"]
  assert found["points"]["busy_s"] == [0, 21]
  assert found["p"]["trained"] == [[195] * 3, [0, 98, 100_000]]
  assert found["points"]["dead"] == pytest.approx([0.0, 1 / 3], abs=1e-6)
  change("sys.argv", ["x", str(tmp_path / "results")])
  language.main()
  row = (
    "| N = 16 | .33 (.00-1.00) | .33 (.00-1.00) | .05 (.00-.11) | 6 | 1 | .20"
  )
  assert row in capsys.readouterr().out


@pytest.mark.parametrize("of", [n16, n512, need])
def test_a_config_of_hard_prompts_is_an_arm(of):
  arm = arms.ARMS[of.__name__.rpartition(".")[2]]
  c = settings.training(of.get_config())
  got = c.advantage.kind, c.sampling.samples, c.optim.lr
  assert got == (arm.kind, arm.samples, 2.0**arm.power)
  got = c.filter.keep, c.reference.kl_weight, c.sampling.max_new_tokens
  assert (*got, c.eval.temperature, c.eval.top_p) == ("all", 0.0, 4, 1.0, 1.0)
  most = c.run.steps * min(arm.samples, 2048)  # by need about a half of it
  assert 0.95 < most / arm.rollouts < 2.1 and c.run.keep_checkpoints >= 8


def result(busy, *p, samples=None):
  """A run with a checkpoint for each list of probabilities."""
  p = [np.array(x) for x in p]
  points = {
    "step": [*range(len(p))],
    "samples": samples or [1000 * i for i in range(len(p))], "busy_s": busy,
    "heldout": [float(x.mean()) / 2 for x in p],
    **{k: [float(of(x).mean()) for x in p] for k, of in study.MEASURES.items()},
  }  # fmt: skip
  units = [np.round(1e5 * x).astype(int).tolist() for x in p]
  return {
    "machine": "M", "points": points, "p": {"trained": units, "heldout": units},
  }  # fmt: skip


def test_a_summary_by_hand():
  answers = np.array([[0.5, 0.25], [9e-5, 0.0], [0.0, 0.0], [1.0, 0.0]])
  got = arms.summary(answers)
  assert got["pass_at_1"] == pytest.approx((0.75 + 9e-5 + 1) / 4)
  assert (got["dead"], got["won"]) == (0.5, 0.5)
  some = 1 - (1 - 9e-5) ** 256
  assert got["best_at_256"] == pytest.approx((2 + some) / 4, abs=1e-6)


def test_prompts_lie_between_checkpoints_and_end_with_the_last():
  runs = {"0": result([0.0, 10.0, 30.0], [0.0, 0.2], [0.2, 0.2], [1.0, 0.6])}
  at = lambda what, x, by="busy_s": study.prompts(runs, what, by, x)[0].tolist()
  assert at("pass_at_1", 5.0) == pytest.approx([0.1, 0.2])
  assert at("pass_at_1", 1500, "samples") == pytest.approx([0.6, 0.4])
  assert at("pass_at_1", 99.0) == pytest.approx([1.0, 0.6])
  assert at("dead", 4.0) == pytest.approx([0.6, 0.0])


def test_an_interval_has_the_variance_of_seeds_and_of_prompts():
  rng = np.random.default_rng(0)
  seeds, prompts = rng.normal(0.0, 0.5, (20, 1)), rng.normal(0, 2, (1, 128))
  got = study.interval(seeds + prompts)
  width = 2 * 1.96 * (0.25 / 20 + 4.0 / 128) ** 0.5
  assert got["high"] - got["low"] == pytest.approx(width, rel=0.15)


def test_differences_are_paired_by_prompt():
  p = np.random.default_rng(0).uniform(0.2, 0.6, 64)
  arm = lambda more: {
    str(s): result([0.0, 10.0], [0.0] * 64, p + more) for s in range(3)
  }
  both = {"a": arm(0.2), "b": arm(0.0)}
  got = study.difference(both, "a", "b", 10.0, "pass_at_1")
  assert got["mean"] == pytest.approx(0.2, abs=1e-4)
  assert got["high"] - got["low"] < 1e-3


def test_progress_is_read_where_a_level_is_first_reached():
  up = [0.0, 0.0], [0.2, 0.2], [0.6, 0.0], [0.1, 0.1]
  runs = {"0": result([0.0, 10.0, 20.0, 30.0], *up)}
  got = study.at_progress(runs, 0.25)
  assert got["busy_s"] == {"mean": pytest.approx(15.0), "half": 0.0}
  assert got["samples"]["mean"] == pytest.approx(1500.0)
  assert got["dead"]["mean"] == pytest.approx(0.25)  # of none and of a half
  assert study.at_progress(runs, 0.31) is study.at_progress(runs, 0.0) is None
  two = study.spread([1.0, 3.0])
  half = scipy.stats.t.ppf(0.975, 1) * 2**0.5 / 2**0.5
  assert two == {"mean": 2.0, "half": pytest.approx(half)}


def test_a_slope_by_hand():
  """dead = .8 - .1 log2 N: N = 8 .5, 32 .3, 128 .1."""
  of = lambda dead: {
    str(s): result([0.0, 1.0], [0.5] * 10, [0.0] * dead + [0.5] * (10 - dead))
    for s in range(2)
  }
  results = {"n8": of(5), "n32": of(3), "n128": of(1), "n512-whitened": of(7)}
  results["n512-twice-the-rate"] = of(9)
  got = study.slope(results, "maxrl")
  assert got["mean"] == pytest.approx(0.1) == got["low"] == got["high"]
  assert sorted(got["n"]) == [8, 32, 128]
  assert study.slope(results, "tokens") is None  # one N has no slope


def test_a_run_beside_the_stored_ones(tmp_path, monkeypatch, capsys):
  """After s steps of s seconds p is s / 20 for both prompts, s / 10 for the one
  twin; besides the start two of five steps are read."""
  folder, both, twin = (tmp_path / name for name in ("mine", "both", "twin"))
  for file, asked in ((both, "ab"), (twin, "c")):
    made.dump(file, [{"prompt": x, "right": ["8"]} for x in asked])
  data = {"data": {"files": [str(both)], "heldout_files": [str(twin)]}}
  data["sampling"] = {"n": 512, "rounds": []}
  about = {
    "config": data | {"policy": {"checkpoint": "embedded:hard"}},
    "machine": {"devices": ["cpu"], "processor": "P"}, "versions": {"jax": "1"},
  }  # fmt: skip
  made.dump(folder / "config.json", [about])
  line = lambda s: {"step": s, "time/busy_s": s, "data/samples_total": 2048 * s}
  made.dump(folder / "metrics.jsonl", [line(s) for s in range(1, 6)])
  for name in ("0", *"12345", "4.part"):
    (folder / "checkpoints" / name).mkdir(parents=True)
  # The step stands for its parameters.
  change = monkeypatch.setattr
  change(exact.huggingface, "load", lambda path: (None, jnp.zeros(())))
  change(exact.checkpoints, "read_params", lambda _, step, like: (step, step))
  read = lambda step, k: np.full(k.some.shape, float(step) / 10 / len(k.some))
  change(exact, "reader", lambda policy: read)
  change(arms, "POINTS", 2)
  got = arms.measured(folder)
  both, twin = [[0] * 2, [10_000] * 2, [25_000] * 2], [[0], [20_000], [50_000]]
  assert got["p"] == {"trained": both, "heldout": twin}
  of = lambda *names: [got["points"][name] for name in names]
  assert of("step", "busy_s") == [[0, 2, 5], [0, 3, 15]]
  assert of("samples", "pass_at_1") == [[0, 4096, 10_240], [0, 0.1, 0.25]]
  assert (got["machine"], of("heldout")) == ("P, jax 1", [[0, 0.2, 0.5]])
  # The stored ones have as many rollouts half-way, after 5 of their 10 seconds.
  one = result([0.0, 10.0], [0.0] * 2, [0.4, 0.2], samples=[0, 20_480])
  made.dump(tmp_path / "stored", [{name: {"0": one} for name in report.FIRST}])
  change(first, "STORED", tmp_path / "stored")
  change(first.flags, "FLAGS", SimpleNamespace(workdir=[str(folder)]))
  change(first.runpy, "run_module", lambda *_, **how: sys.exit(75))
  with pytest.raises(SystemExit, match="75"):
    first.main()
  assert not capsys.readouterr().out
  change(first.runpy, "run_module", lambda *_, **how: sys.exit(0))
  first.main()
  said = capsys.readouterr().out
  assert "| 4,096 | 3 | 0.1 |" in said
  assert "At 5 CPU-s of M, where N = 512 has 10,240 rollouts:" in said
  assert "| this run, mine | .25 | .00 | .50 | 1 |" in said
  assert "| N = 512 | .15 (" in said


def test_what_is_unknown_or_missing_is_said(tmp_path, monkeypatch):
  monkeypatch.setattr("sys.argv", ["run", str(tmp_path), "--arms=n16,n17"])
  with pytest.raises(SystemExit, match="--arms=n17 is not one of n16, "):
    run.main()
  with pytest.raises(SystemExit, match=r"no results; run bash launch/wall\.sh"):
    arms.read(tmp_path)
  one = {"0": result([0.0, 1.0], [0.1], [0.2])}
  arms.write(tmp_path / "n16" / "0.json", one["0"])
  assert arms.read(tmp_path) == {"n16": one}
  (tmp_path / "bad.json").write_text("{")
  with pytest.raises(SystemExit, match=r"bad\.json is damaged .* delete it"):
    arms.read(tmp_path / "bad.json")
  monkeypatch.setattr("sys.argv", ["report", str(STORED), "--run=none"])
  with pytest.raises(SystemExit, match="--run=none is no run of configs/n512"):
    report.main()


def test_prompts_that_came_back_are_counted():
  """Dead half-way: two of three; one of these ends above .01."""
  p = [0.5, 0.5, 0.5], [0.5, 0.0, 9e-5], [0.0, 0.009, 0.011]
  results = {"n8": {"0": result([0.0, 1.0, 2.0], *p)}, "earlier/own": {}}
  assert study.came_back(results) == (2, 1)


def test_the_documents_have_the_tables_of_the_results():
  results = arms.read(STORED)
  table = report.first_table(results)
  others = report.sentences(results) + report.progress_table(results)
  others += report.law_table(results) + report.end_table(results)
  others += language.tables(arms.read(SPOKEN))
  told = {"README.md": table[2:], "launch/wall/README.md": others}
  for path, lines in told.items():
    lacking = {*lines} - {*(ROOT / path).read_text().splitlines()}
    assert not lacking, f"{path}; python -m launch.wall.report"


def test_stored_curves_agree_with_their_prompts():
  every = [*arms.read(STORED).items(), *arms.read(SPOKEN).items()]
  for name, runs in every:
    for seed, one in runs.items():
      points = one["points"]
      assert points["busy_s"] == sorted(points["busy_s"]), (name, seed)
      of = {"trained": "pass_at_1", "heldout": "heldout"}
      for side, p in one["p"].items():
        want = np.mean(p, axis=1) / arms.UNITS
        np.testing.assert_allclose(points[of[side]], want, atol=1e-3)
