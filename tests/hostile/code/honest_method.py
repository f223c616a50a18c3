# call, pass: a class with annotations that it does not import
class Solution:
  def __init__(self):
    self.best = 0  # noticed if an instance were used twice

  def rise(self, numbers: List[int]) -> Optional[int]:
    run = 0
    for i, n in enumerate(numbers):
      run = run + 1 if i and n > numbers[i - 1] else 1
      self.best = max(self.best, run)
    return self.best
