# stdio, pass: input(), a guard, an exit with 0, stdout closed
import sys


def main():
  count = int(input())
  numbers = list(map(int, input().split())) if count else []
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  print(best)
  sys.stdout.close()
  sys.exit(0)


if __name__ == "__main__":
  main()
