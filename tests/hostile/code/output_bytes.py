# stdio, fail: bytes that are no text, and the right number among many
import os

os.write(1, bytes(range(256)) * 100)
os.write(1, b"\n" + b" ".join(b"%d" % i for i in range(1_000)))
