# call, pass: threads, a pool that is never shut down, and asyncio
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(8)


async def run_from(numbers, i):
  await asyncio.sleep(0)
  k = i
  while k + 1 < len(numbers) and numbers[k] < numbers[k + 1]:
    k += 1
  return k - i + 1


def rise(numbers):
  out = []
  threading.Thread(target=out.append, args=(0,)).start()
  tasks = [
    pool.submit(asyncio.run, run_from(numbers, i)) for i in range(len(numbers))
  ]
  return max((t.result() for t in tasks), default=0)
