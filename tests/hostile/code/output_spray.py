# stdio, fail: every number that could be right
for i in range(10_000):
  print(i)
