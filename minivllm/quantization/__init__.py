"""Linear layers whose weights are kept in 4 or 8 bits."""

from minivllm.quantization.formats import Packed, dequantise, quantise

__all__ = ["Packed", "dequantise", "quantise"]
