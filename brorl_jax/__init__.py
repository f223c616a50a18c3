"""BroRL in JAX: reinforcement learning with N = 512 rollouts per prompt.

Axis alphabet, used in every signature and suffix of this package:

  P  prompts in a step        T  response positions     D  model width
  N  rollouts per prompt      S  prompt positions       H  attention heads
  B  sequences, B = P * N     V  vocabulary             G  key/value heads
  R  rows in flight (slots)   L  layers                 K  head size
                              F  feed-forward width     Q  query positions
"""
