"""Every hyperparameter: its unit, its default and why. Experiments change few.

Not an experiment: run `n512.py` or `n16.py`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = (
    0  # of puzzles, rollouts and shuffling; all derived from (seed, step)
  )
  c.steps = 60  # rollout -> update rounds; each makes `minibatches` updates

  # Rollouts. The dial of this project is `n`; `samples` keeps the cost of a
  # step fixed when it turns, so fewer prompts are seen with a larger n.
  c.n = 512  # rollouts per prompt
  c.samples = 16384  # rollouts trained on per step, multiple of n
  # Rollouts drawn at a time until enough are kept, multiple of n. The last
  # round is drawn whole, so small rounds waste less.
  c.round_samples = 4096
  c.max_rounds = 40  # give up on a step after so many
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

  # Follows every question, on a line of its own. Verifiers read what stands
  # between the last <answer> and </answer>, or the whole response.
  c.instruction = ""
  # Where prompts come from: reasoning-gym tasks with their settings.
  c.families = families()

  # Update.
  c.minibatches = 2  # optimizer updates per step, over whole groups
  c.rows = 32  # different rollouts of one prompt per block, padded
  c.blocks = 16  # blocks per microbatch, multiple of mesh_data
  c.clip_low = 0.2  # ratio may fall to 1 - clip_low (ProRL v2)
  c.clip_high = 0.28  # ratio may rise to 1 + clip_high (ProRL v2)
  # Unknown for BroRL; the released ProRL v2 scripts use 1e-4.
  c.kl_weight = 1e-4  # of the k2 term; 0 keeps no reference policy
  c.kl_clamp = 10.0  # nats (ProRL v2)

  # AdamW. Unknown for BroRL, but that its rate is scaled with sqrt(samples).
  c.lr = 3e-4  # constant after warmup
  c.warmup = 5  # updates
  c.b1 = 0.9
  c.b2 = 0.95
  c.eps = 1e-8
  c.weight_decay = 0.0  # per unit of lr
  c.max_grad_norm = 1.0
  # "factored" keeps means of rows and columns of matrices of 96 x 96 or more, a
  # quarter less of the state; updates differ from AdamW's.
  c.second_moment = "full"

  # Policy.
  # Hugging Face directory, or a name to download it by; "" is the embedded
  # policy. With --mode=export: the folder of a run.
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
  c.eval_prompts = 60  # held-out puzzles per family
  c.eval_n = 16  # samples per held-out puzzle
  # The theorem is measured on so many prompts of a step and on the likeliest
  # responses to each: at 2 x 16 it costs less than 2 % of a step.
  c.theory_prompts = 2
  c.theory_responses = 16
  c.samples_shown = 4  # rollouts per step that go to samples.jsonl
  return c.lock()  # a misspelt field in a config is an error


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
