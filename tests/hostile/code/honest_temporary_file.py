# call, pass: a temporary file, which takes a place to write
import os
import tempfile


def rise(numbers):
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "numbers")
    with open(path, "w") as file:
      file.write(" ".join(map(str, numbers)))
    with open(path) as file:
      numbers = [int(word) for word in file.read().split()]
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return best
