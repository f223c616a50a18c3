# stdio, pass: os.read and os.write, and leaves with os._exit
import os

data = b""
while piece := os.read(0, 7):
  data += piece
numbers = [int(word) for word in data.split()[1:]]
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
os.write(1, b"%d\n" % best)
os._exit(0)
