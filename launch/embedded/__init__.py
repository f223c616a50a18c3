"""Makes the embedded policies, the model directories in brorl_jax/assets.

python -m launch.embedded steps --workdir=steps

recipes.py         what each policy is, and what it is shown
teacher.py         tokenizer, two stages of supervised training, a directory
demonstrations.py  puzzles with responses, right ones and wrong ones
steps/             solutions of puzzles step by step
supervised.py      trains any checkpoint on pairs of prompt and response
tokenizer.py       trains the tokenizer on the puzzles' questions
"""
