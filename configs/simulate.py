r"""Figure 3 of the paper: what becomes of the correct mass, by N.

  python -m brorl_jax.main --mode=simulate --config=configs/simulate.py \
      --workdir=runs/simulate

The paper states vocabulary, number of correct tokens, rewards, centring, AdamW
with rate 1e-3, 1,000 steps and N. The rest it leaves open; with the values here
its axis ranges come out, and its claims in words but for one: in the text small
N progresses more slowly, with occasional regressions; here N <= 16 falls from
the first step on. The third panel, the worst drop, is decided by one token at
small N and differs from seed to seed.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.seeds = 2  # runs per N; curves show their mean
  c.n = (4, 8, 16, 512, 51200)  # draws per step, the paper's
  # Between them, and beyond: only the ends are drawn.
  c.dense_n = (32, 64, 128, 256, 1024, 2048, 4096, 8192, 16384)
  c.steps = 1000
  c.vocab = 128000  # tokens
  c.correct = 10000  # of which these have reward 1, the others -1
  c.seeding = 3.0  # logit of correct tokens at the start; "optional" there
  c.anchor = 5.0  # logit of one token; that it is a correct one is a guess
  c.centred = True  # rewards minus their mean over the N draws
  # "probability" is the paper's; "ratio" and "log_probability" are unbiased but
  # for the factor (N - 1) / N of a mean that includes the draw itself.
  c.surrogate = "probability"
  c.lr = 1e-3
  c.b1 = 0.9  # not stated; the library's default
  c.b2 = 0.999  # the same
  # Decides the outcome at small N: of tokens that are not drawn the median
  # gradient is 1.4e-9 to 1.8e-9 for correct ones, of which eps is 5.6 to 7.1
  # times, and 7e-11 to 9e-11 for wrong ones (112 to 142 times). Not stated; the
  # library's default.
  c.eps = 1e-8
  c.weight_decay = 0.01  # not stated; the library's default
  # The control, plain gradient descent. Q_pos gains 7e-5 to 1e-4 at every N; at
  # rates of 1e4 the anchor takes all of the mass within the run.
  c.sgd_lr = 300.0
  return c.lock()  # a misspelt field in a config is an error
