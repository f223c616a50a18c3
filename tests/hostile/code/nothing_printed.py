# stdio, fail: no output
