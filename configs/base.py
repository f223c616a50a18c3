"""Every hyperparameter: its unit, its default and why. Experiments change few.

Not an experiment of its own: run `n512.py` or `n16.py`. `launch/switches.py`
changes one field of it after the other.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = (
    0  # of puzzles, rollouts and shuffling; all derived from (seed, step)
  )
  c.steps = 60  # rollout -> update rounds; each makes `minibatches` updates

  # A run ends, before `steps`, with the step that brings the seconds of its
  # steps (time/busy_s: of the processor, or of the wall with an accelerator;
  # compiling, evaluations and checkpoints aside) to this. 0: no bound.
  c.max_busy_s = 0.0

  # Rollouts. The dial of this project is `n`. A step trains on samples / n
  # prompts, those that dynamic sampling keeps.
  c.n = 512  # rollouts per prompt
  c.samples = 8192  # rollouts trained on per step, multiple of n
  # Rollouts whose prompts are on the devices at a time, multiple of n: a prompt
  # that is done makes room for the next.
  c.in_flight = 4096
  # Rollouts of a prompt that decode together, at most n are used; 0: as many as
  # fit. Responses are short: 128 instead of 512 gives 1.36 times the tokens per
  # second.
  c.slots = 128
  c.lanes = 0  # prompts that decode together; 0: as many as fit
  # Keys and values of responses as int8 instead of `dtype`: twice the slots in
  # half precision. Not exact, so that policy/logp_gap_max grows.
  c.int8_cache = False
  # Attention of sampling on NVIDIA GPUs as one kernel that reads what each row
  # sees, not whole pages. Its speed is not measured, hence off.
  c.decode_kernel = False
  c.prompt_tokens = 40  # longest prompt; longer ones are refused
  c.max_new_tokens = 6  # longest response, its end token included
  # The paper does not state it; 1 makes sampler and trainer the same policy.
  c.temperature = 1.0

  # Where prompts come from: a share for each domain, reasoning-gym tasks with
  # their settings for the domain "gym", and files for the others.
  c.domains = domains()
  c.families = families()
  c.data = data()

  # CPU-seconds that a program may take for a test, where its example has no
  # `time_limit`, and for all its tests together. Sleep counts like computing,
  # waiting for a CPU does not. Public sets give a test 1 to 10 seconds.
  c.code_test_s = 5.0
  c.code_total_s = 30.0
  # Run programs although there is no bubblewrap or it may not make namespaces:
  # they can then find out which files exist, and fail with threads or files.
  c.allow_inner = False

  # 0: every prompt is new. Otherwise a run has so many, each at most once in a
  # step.
  c.distinct_prompts = 0

  # Dynamic sampling, on raw rewards. "differ": the rewards of a group are not
  # all equal. "mean": their mean is between 0 and 1. "solved": some are 1 and
  # some are not. "all": no dynamic sampling. Which rule is meant for rewards
  # between 0 and 1 is unknown; for 0 and 1 alone the three agree.
  c.keep = "differ"
  # Only groups with a mean between these. With N = 512 "differ" keeps prompts
  # that are solved 99 times in 100, with N = 16 few of them. Off: 0 and 1.
  c.keep_above = 0.0
  c.keep_below = 1.0
  # Give up on a step after so many times its prompts. Unknown for BroRL; its
  # pass rate of 62 % needs 1.6.
  c.max_oversampling = 10
  # Prompts that were rejected in so many visits in a row, by the band too, rest
  # for so many steps; 0: never. Needs distinct_prompts. Not in BroRL.
  c.rest_after = 0
  c.rest_steps = 20

  # Advantages. REINFORCE++-baseline whitened over "tokens" (as the released
  # code) or "trajectories" (as the paper's formula), "grpo", or "centered": the
  # reward less the mean of its group.
  c.advantage = "tokens"
  # How correct rollouts of a group share their credit: "equal" for each,
  # "distinct": equal for each different answer, "inverse": in proportion to one
  # over the probability of the whole response. These two are ours, not BroRL's.
  c.credit = "equal"

  # Length, in tokens. The cosine reward is length_max for an empty response,
  # length_min at max_new_tokens, and on for the first 100 of every 600 steps
  # (ProRL v2). Its weight and ends are unknown, and whether wrong answers get
  # it: if they do, short wrong answers gain on long wrong ones.
  c.length_weight = 0.0  # 0: off. Whether BroRL has it on is unknown
  c.length_min = -0.5
  c.length_max = 0.0
  c.length_wrong = False
  c.length_on = 100
  c.length_off = 500  # 0: always on
  # DAPO's overlong penalty: falls to -1 over the last tokens before the limit.
  c.overlong_weight = 0.0  # 0: off; DAPO has 1
  c.overlong_buffer = 2  # tokens; DAPO has 4,096 of 20,480
  # Reward of a response that was cut, times this. 1: as it is. Released scripts
  # have 0 under the name of stop-properly coefficient, and so have the presets
  # of language models; an answer of 6 tokens that is right has an end.
  c.truncated_factor = 1.0
  c.mask_truncated = False  # leave responses that were cut out of everything

  # Update.
  # Optimizer updates per step, over whole groups, whatever N is. Unknown for
  # BroRL, only that both of its arms have as many; ProRL has 4.
  c.minibatches = 2
  c.rows = 32  # different rollouts of one prompt per block, padded
  c.blocks = 16  # blocks per microbatch, multiple of mesh_data
  c.loss = "ppo"  # or "gspo": one ratio per sequence, clip about 3e-4
  c.clip_low = 0.2  # ratio may fall to 1 - clip_low (ProRL v2)
  c.clip_high = 0.28  # ratio may rise to 1 + clip_high (ProRL v2)
  # Loss of a bad token at most so many times its advantage; 0: no bound. 3 is
  # usual; the released ProRL v2 scripts have none.
  c.dual_clip = 0.0
  c.entropy_weight = 0.0  # nats; none in ProRL and BroRL
  # Unknown for BroRL; the released ProRL v2 scripts use 1e-4.
  c.kl_weight = 1e-4  # of the k2 term; 0, in all phases: no reference is kept
  c.kl_clamp = 10.0  # nats that a token counts at most in it (ProRL v2)
  # The reference becomes the policy after so many steps (ProRL v2: 200 to 500;
  # unknown for BroRL), above a KL in nats per token, or after so many
  # evaluations without a better score. 0: not for that. The 30 to 60 steps of a
  # laptop have none; language models, in presets.py, have two in a run.
  c.reset_every = 300
  c.reset_above_kl = 0.0
  c.reset_stalled = 0
  c.reset_optimizer = False  # True: moments and warm-up start anew (ProRL)

  # Trainer against sampler: "truncated" (TIS; BroRL, cap unknown, 2 is usual),
  # "banded" (IcePop; 0.5 to 5 in released scripts), "sequence": whole rollouts
  # by their geometric mean (0.999 to 1.002 there), or "none".
  c.correction = "truncated"
  c.correction_cap = 2.0
  c.correction_low = 0.5
  c.correction_high = 5.0
  c.sequence_low = 0.999
  c.sequence_high = 1.002

  # Sample the next step with the parameters before this update, which then
  # happens while the devices wait for verdicts. Not for the step after a
  # checkpoint.
  c.pipeline = False

  # AdamW. Unknown for BroRL, but that its rate grows with the root of samples.
  c.lr = 3e-4  # constant after warmup
  # lr times the root of (count / lr_base): "samples" of a step (the paper), or
  # "prompts" of an update, which were what limited the step in small studies.
  c.lr_scaling = "none"
  # The count that lr is for: samples of a step, or prompts of an update.
  c.lr_base = 8192
  c.warmup = 5  # updates
  c.b1 = 0.9
  c.b2 = 0.95
  c.eps = 1e-8
  c.weight_decay = 0.0  # per unit of lr
  c.max_grad_norm = 1.0
  # "factored" keeps means of rows and columns of matrices of 96 x 96 or more, a
  # quarter less of the state; updates differ from AdamW's.
  c.second_moment = "full"

  # Changes during a run: dicts of "from_step" and the fields that change then,
  # such as {"from_step": 201, "n": 32, "length_weight": 1.0}.
  c.phases = ()

  # Policy.
  # Hugging Face directory, or a name to download it by; "" is the embedded
  # policy. With --mode=evaluate also, and with --mode=export only: the folder
  # of a run, or one checkpoint of it.
  c.checkpoint = ""
  c.dtype = "float32"  # of activations; parameters and losses are float32

  # What the backward pass computes once more: "layer" keeps the input of each
  # layer alone, "products" the results of its matrix products too, "nothing"
  # computes nothing twice. On a CPU "products" is 5 to 10 % faster in float32.
  c.remat = "layer"
  # What lies in host memory while no program reads it: "nothing", "reference",
  # or "moments", which is both.
  c.offload = "nothing"

  # Devices: prompts and rows over `data`, heads and vocabulary over `model`.
  c.mesh_data = -1  # -1 takes all that are left
  c.mesh_model = 1
  # Memory of a device in bytes; 0 asks it. With a number --mode=plan also plans
  # for more devices than are here, which it takes for accelerators.
  c.memory_bytes = 0

  # Output.
  c.save_every = 10  # steps
  c.keep_checkpoints = 3  # newest ones
  c.eval_every = 10  # steps
  c.eval_prompts = 60  # held-out prompts per task
  c.eval_n = 16  # samples per held-out prompt (the paper)
  # Held-out prompts are sampled as the paper's and most published scores are,
  # not as in training: sharper, and without the unlikeliest twentieth.
  c.eval_temperature = 0.6  # 0: the likeliest token
  c.eval_top_p = 0.95  # 1: nothing is cut
  # The theorem is measured on so many prompts of a step and on the likeliest
  # responses to each: with answers of 6 tokens 2 x 16 cost less than 2 % of a
  # step.
  c.theory_prompts = 2  # 0: not measured
  c.theory_responses = 16
  # Longer responses are left out. At .3 nats a token one of 128 has a
  # probability of 2e-17, which moves no mean; but gradients of 2 x 16 x 15,360
  # tokens would take 42 GB at the size of preset 1p5b.
  c.theory_tokens = 128
  c.samples_shown = 4  # rollouts per step that go to samples.jsonl
  return c.lock()  # a misspelt field in a config is an error


def domains() -> ml_collections.ConfigDict:
  """Domain -> its share of the prompts, what it asks for, and what it pays.

  weight: Among those domains that have prompts: shares need not add up to 1.
  instruction: Follows every question, on a line of its own.
  reward: "pass", 1 for a response that is right in all its parts and 0 for any
    other; or "score", the share of the parts that are right.
  """
  c = ml_collections.ConfigDict()
  add = lambda name, instruction, reward: c.update(
    {name: {"weight": 1.0, "instruction": instruction, "reward": reward}}
  )
  # What stands between the last <answer> and </answer>, or all of the response.
  # ProRL pays the scorers' numbers; their partial credit is easy to exploit.
  add("gym", "", "pass")
  # The last complete \\boxed{}.
  add("math", "Think step by step and put the answer into \\boxed{}.", "pass")
  # The last fenced block. ProRL pays the share of tests that pass.
  add("code", "Write the program in one fenced code block.", "score")
  add("stem", "Put the answer, or its letter, into \\boxed{}.", "pass")
  add("instructions", "", "score")  # as ProRL
  return c


def data() -> ml_collections.ConfigDict:
  """Files of examples: the format is told in brorl_jax/tasks/dataset.py."""
  c = ml_collections.ConfigDict()
  c.files = ()  # jsonl or parquet
  # Files that are not trained on; without any, one example in heldout_one_in of
  # the files above, by a hash of its text, is held out. --mode=evaluate may
  # have these alone.
  c.heldout_files = ()
  c.heldout_one_in = 10
  c.skip_bad = False  # lines that are wrong are left out and counted
  c.drop_long = False  # so are prompts of more than prompt_tokens
  return c


def families() -> ml_collections.ConfigDict:
  """Task -> share of the prompts and settings of its generator.

  Prompts of at most 40 and answers of at most 5 tokens: what a policy of half
  a million parameters can learn in minutes.
  """
  c = ml_collections.ConfigDict()
  add = lambda name, **settings: c.update(
    {name: {"weight": 1.0, "settings": settings}}
  )
  add("letter_counting", min_words=2, max_words=3)
  add("count_primes", min_n=1, max_n=50)
  add(
    "leg_counting",
    min_animals=1,
    max_animals=2,
    min_instances=1,
    max_instances=3,
  )
  add("gcd", min_value=1, max_value=40)
  add(
    "basic_arithmetic",
    min_terms=2,
    max_terms=3,
    min_digits=1,
    max_digits=1,
    operators=["+", "-", "*"],
    allow_parentheses=False,
    allow_negation=False,
  )
  add(
    "number_sequence",
    min_terms=4,
    max_terms=5,
    min_value=-10,
    max_value=10,
    max_complexity=1,
  )
  add("spell_backward", min_word_len=3, max_word_len=4)
  add(
    "simple_equations",
    min_terms=2,
    max_terms=2,
    min_value=1,
    max_value=10,
    operators=["+", "-"],
    operators_weights=[0.5, 0.5],
  )
  return c
