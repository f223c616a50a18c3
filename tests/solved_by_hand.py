"""Puzzles with the careful steps that were found by hand; no test file."""

X = "\N{MULTIPLICATION SIGN}"

# Question or "", metadata, answer, the careful steps.
EXAMPLES = {
  "chain_sum": ("", {"expression": "57 + 8 - 70"}, "-5", "57+8=65\n65-70=-5"),
  "products": ("", {"expression": "47 * 36"}, "1692",
    "7*6=42\n4*6+4=28\n47*6=282\n7*3=21\n4*3+2=14\n47*3=141\n282+1410=1692"),
  "gcd": ("", {"numbers": [36, 84]}, "12",
    "36*2=72\n84-72=12\n12*3=36\n36-36=0"),
  "lcm": ("", {"numbers": [28, 12]}, "84",
    "12*2=24\n28-24=4\n4*3=12\n12-12=0\n28/4=7\n7*12=84"),
  "base_conversion": ("",
    {"source_base": 6, "target_base": 12, "source_repr": "105",
    "decimal_value": 41}, "35",
    "0*6+1=1\n1*6+0=6\n6*6+5=41\n41=3*12+5\n3=0*12+3"),
  "simple_equations": ("", {"equation": "17 - 14*h = -165", "variable": "h"},
    "13", "17+165=182\n14*10=140\n182-140=42\n14*3=42\n42-42=0\n10+3=13"),
  "letter_counting": ("",
    {"target_letter": "e", "span": ["Free", "the", "art"]}, "3",
    "f r e e 0+2=2\nt h e 2+1=3\na r t 3+0=3"),
  "leg_counting": ("", {"animals": {"lobster": 3, "sea slug": 2, "duck": 4}},
    "38", "3*10=30\n2*0=0\n30+0=30\n4*2=8\n30+8=38"),
  "count_bits": ("", {"number": 11}, "3",
    "11=2*5+1 1\n5=2*2+1 2\n2=2*1+0 2\n1=2*0+1 3"),
  "prime_factorization": ("", {"number": 90}, f"2 {X} 3 {X} 3 {X} 5",
    "90/2=45\n45%2=1\n45/3=15\n15/3=5"),
  "countdown": ("", {"numbers": [3, 7, 5], "target": 22}, "5*3+7",
    "5*3=15\n15+7=22"),
  "path_star": (
    "As |1 2|2 3/1 3 = 1 2 3\n\nSolve:\n|4 7|9 4|9 5|7 8|5 6/9 8 = \n",
    {"center": 9, "goal": 8, "goal_path": [9, 4, 7, 8]}, "9 4 7 8",
    "7 8\n4 7\n9 4",
  ),
}  # fmt: skip


def entry_of(task: str) -> dict:
  question, metadata, answer, _ = EXAMPLES[task]
  metadata = {**metadata, "source_dataset": task}
  return {"question": question, "answer": answer, "metadata": metadata}


def entry(name="gcd", answer="4", **metadata):
  return {"question": metadata.pop("question", "?"), "answer": answer,
    "metadata": {"source_dataset": name, **metadata}}  # fmt: skip
