"""How tests compile, in their process and in the commands they start."""

import importlib.metadata

# Machine code is made without LLVM's optimizations and without XLA's emitters
# of fusions (jax 0.12 has no other way): making it was two thirds of the tests'
# time and is a third so. XLA's own passes stay. To make it in parts, one for
# each thread, takes a fifth more of the processor, which two workers share.
QUICK = (
  "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
EMITTERS = "xla_cpu_use_fusion_emitters"
if importlib.metadata.version("jaxlib").startswith("0.10."):
  QUICK += f" --{EMITTERS}=false"
