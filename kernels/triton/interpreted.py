"""Whether kernels run in triton's interpreter (TRITON_INTERPRET=1): on numpy arrays, so on a CPU, slowly.

triton.jit decides when a kernel is decorated. In the interpreter bfloat16 arithmetic can be silently wrong (a
conversion truncates, for one), so kernels have a constant UPCAST with which they compute in float32.
"""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
