# call, pass: much of the standard library, warm or not
import array
import bisect
import collections
import copy
import csv
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import heapq
import itertools
import json
import math
import operator
import random
import re
import statistics
import string
import struct
import textwrap
import typing
import unittest
import uuid
import zlib


@dataclasses.dataclass
class State:
  best: int = 0
  run: int = 0


def rise(numbers):
  state = State()
  for a, b in itertools.zip_longest([None, *numbers[:-1]], numbers):
    if b is not None:
      state.run = state.run + 1 if a is not None and b > a else 1
      state.best = max(state.best, state.run)
  used = (array, bisect,
    collections, copy, csv, datetime, decimal, enum, fractions)  # fmt: skip
  more = functools, hashlib, heapq, json, math, operator, random, re, statistics
  last = string, struct, textwrap, typing, unittest, uuid, zlib
  return state.best if used and more and last else None
