"""What GPTQ and AWQ share: which layers they quantize, what they calibrate on, and how their result is published."""

GROUP_SIZES = (128, 64, 32)  # that the kernels of both formats know
