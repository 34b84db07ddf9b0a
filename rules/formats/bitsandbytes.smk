"""bnb-nf4, bnb-nf4-dq, bnb-fp4 and bnb-int8: bitsandbytes, without calibration."""

# Matrices of the blocks in 4 bits, with a scale of 4 bytes for 64 weights; with double quantization the scale has one
# byte, and 256 scales share another of 4 bytes
BLOCKS = Size(0.5, rest=2, group=4, group_size=64)
DOUBLE = Size(0.5, rest=2, group=1 + 4 / 256, group_size=64)
ROWS = Size(1, rest=2, row=4)  # in 8 bits, a scale of 4 bytes a row

for name, size, type_, double in (
    ("bnb-nf4", BLOCKS, "nf4", False),
    ("bnb-nf4-dq", DOUBLE, "nf4", True),
    ("bnb-fp4", BLOCKS, "fp4", False),
    ("bnb-int8", ROWS, "int8", False),
):
    FORMATS[name] = Format(
        layout="bitsandbytes",
        engine="bitsandbytes",
        env="quantizers",
        program="build.bitsandbytes",
        parameters={"type": type_, "double_quant": double},
        resources=BuildResources(size, ROUNDED, ROUNDED_CUDA, ROUNDED_TIME, copies=2),
    )
