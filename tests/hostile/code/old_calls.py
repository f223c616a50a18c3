# call, fail: calls of other architectures, in machine code
import ctypes
import mmap


def rise(numbers):
  code = b"\xb8\x02\x00\x00\x00\xcd\x80\xc3"  # mov eax, 2; int 0x80; ret
  page = mmap.mmap(-1, 4_096, prot=7)
  page.write(code)
  address = ctypes.addressof(ctypes.c_char.from_buffer(page))
  ctypes.CFUNCTYPE(ctypes.c_int)(address)()
  return 3
