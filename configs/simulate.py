r"""Figure 3 of the paper: the correct mass over training steps, by N.

  python -m brorl_jax.main --mode=simulate --config=configs/simulate.py \
      --workdir=runs/simulate

The paper states vocabulary, number of correct tokens, rewards, centering, AdamW
with rate 1e-3, 1,000 steps and N. It leaves the rest open. The values here
reproduce its axis ranges and all its claims except one: the text says that
small N progresses more slowly, with occasional regressions, but here N <= 16
falls from the first step on. At small N one token decides the third panel, the
worst drop, which differs from seed to seed.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.seeds = 2  # runs per N; curves show their mean
  c.n = (4, 8, 16, 512, 51200)  # draws per step, the paper's
  c.steps = 1000
  c.vocab = 128000  # tokens
  c.correct = 10000  # tokens with reward 1; the others have -1
  c.seeding = 3.0  # initial logit of correct tokens; the paper: "optional"
  c.anchor = 5.0  # initial logit of one token; a correct one is a guess
  c.centred = True  # rewards minus their mean over the N draws
  # "probability" is the paper's. "ratio" and "log_probability" are unbiased up
  # to the factor (N - 1) / N of a mean that includes the draw itself.
  c.surrogate = "probability"
  c.lr = 1e-3
  c.b1 = 0.9  # not stated; the library's default
  c.b2 = 0.999  # the same
  # Decides the outcome at small N. The median gradient of a token that is not
  # drawn is 1.4e-9 to 1.8e-9 if correct (eps is 5.6 to 7.1 times as large) and
  # 7e-11 to 9e-11 if wrong (112 to 142 times). Not stated; the library's
  # default.
  c.eps = 1e-8
  c.weight_decay = 0.01  # not stated; the library's default
  # The control: plain gradient descent. Q_pos gains 7e-5 to 1e-4 at every N. At
  # rates of 1e4 the anchor takes all of the mass within the run.
  c.sgd_lr = 300.0
  return c.lock()  # a misspelt field in a config is an error
