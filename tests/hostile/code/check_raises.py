# check, fail: raises what tests may swallow, and what ends them
def rise(numbers, **options):
  raise [AssertionError, SystemExit, StopIteration][len(numbers) % 3]
