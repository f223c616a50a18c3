# call, fail: subclasses of list, dict, str and float with methods of their own
class List(list):
  def __iter__(self):
    return iter([])

  def __len__(self):
    return 0

  def __eq__(self, other):
    return True


class Float(float):
  def __float__(self):
    return 3.0

  def __sub__(self, other):
    return 0.0

  def __rsub__(self, other):
    return 0.0


def rise(numbers):
  return [List(), {1: List()}, Float("nan")][len(numbers) % 3]
