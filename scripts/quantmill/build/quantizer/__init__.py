"""The parts that quantizers share: layers, calibration, and the program that calls a tool."""

GROUP_SIZES = (128, 64, 32)  # of the kernels of GPTQ and AWQ
