"""torchao-int8 and torchao-fp8: torchao's weight-only types, without calibration."""

for name in ("int8", "fp8"):
    FORMATS[f"torchao-{name}"] = Format(
        layout="torchao",
        engine="torchao",
        env="quantizers",
        program="build.torchao",
        parameters={"type": name},
        # int8 also has a zero point of a byte a row
        resources=BuildResources(Size(1, rest=2, row=5), QUANTIZER, ROUNDED_CUDA, copies=2, like=UNCALIBRATED),
    )
