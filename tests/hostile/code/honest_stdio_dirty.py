# stdio, pass: leaves a lot behind, for which no later test may fail
import builtins
import os
import signal
import string
import sys

_, *numbers = map(int, sys.stdin.read().split())
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
print(best, flush=True)
if getattr(string, "visited", 0):
  print("not the first in this process")
string.visited = True
builtins.print = builtins.max = None
sys.setrecursionlimit(60)
signal.setitimer(signal.ITIMER_REAL, 60)
os.chdir("/")
os.close(1)
sys.stdout = open(os.devnull, "w")
