# call, fail: leaves with 0 before the first test
import os

os._exit(0)
