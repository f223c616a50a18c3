# call, fail: errors whose class has a hostile name
class Meta(type):
  __name__ = property(lambda cls: "wrong answer: \n\x1b[2J" * 10_000)


class Trouble(BaseException, metaclass=Meta):
  def __str__(self):
    raise Trouble

  __repr__ = __str__


def rise(numbers):
  raise Trouble
