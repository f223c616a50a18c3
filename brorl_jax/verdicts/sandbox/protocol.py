"""What the host and a process in the jail tell each other.

Results of a job start with the byte `BEGUN`, sent before the program is
compiled. Frames follow: `FRAME` and two byte strings, the value and, without a
value, the reason.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import struct

# To and from a zygote.
JOB = b"j"
STATUS = struct.Struct("=id")  # wait status and CPU-seconds of a job
BROKEN = 5  # exit status of a job's process that failed by itself

# Results of a program.
BEGUN = b"+"
# Index, wait status, whether it was the first test of its process, CPU seconds,
# lengths of two byte strings.
FRAME = struct.Struct("=ii?dII")
OVERFLOW = -1  # as a status: more output than the limit
BEFORE = -1  # as an index: failed before the first test
KILLED = 9  # exit status of a stdio job: a process of it was killed


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of one program.

  Attributes:
    test_s: CPU seconds of one test, over all its threads. It may also sleep for
      this long. The host counts them (usage.py) and kills the program.
    total_s: The same for all its tests together.
    memory: Address space of one process in bytes, with 64 MiB of stack.
    file_bytes: Size of one file.
    output_bytes: Size of standard output; more is an error.
    result_bytes: Size of the results; more is an error.
    open_files: Descriptors of one process.
    threads: Threads of all processes of the jail's user, which in a user
      namespace are those of one jail. Does not limit root. 0: no threads.
  """

  test_s: float = 5.0
  total_s: float = 30.0
  memory: int = 1 << 30
  file_bytes: int = 8 << 20
  output_bytes: int = 1 << 20
  result_bytes: int = 8 << 20
  open_files: int = 64
  threads: int = 64
