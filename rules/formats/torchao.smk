"""torchao-int8 and torchao-fp8: torchao's weight-only types, without calibration."""

for name in ("int8", "fp8"):
    FORMATS[f"torchao-{name}"] = Format(
        layout="torchao",
        engine="torchao",
        env="quantizers",
        program="build.torchao",
        parameters={"type": name},
        # of int8 a zero point of a byte a row besides
        resources=BuildResources(Size(1, rest=2, row=5), ROUNDED, ROUNDED_CUDA, ROUNDED_TIME, copies=2),
    )
