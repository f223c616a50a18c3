# stdio, fail: leaves notes for the next test in the descriptors and the folder
import os

open("note", "a").write("x")
os.write(0, b"5\n1 2 3 4 5\n")
os.lseek(0, 0, os.SEEK_SET)
print(os.read(0, 100).decode(), open("note").read())
