# stdio, pass: the work is done by a thread with a large stack, never joined
import sys
import threading


def main():
  count, *numbers = map(int, sys.stdin.read().split())
  sys.setrecursionlimit(10**6)

  def longest(i, run, best):
    if i == count:
      return best
    run = run + 1 if i and numbers[i] > numbers[i - 1] else 1
    return longest(i + 1, run, max(best, run))

  print(longest(0, 0, 0))


threading.stack_size(1 << 27)
threading.Thread(target=main).start()
