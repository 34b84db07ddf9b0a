"""hqq-int4: HQQ, four bits with a float zero for each group, without calibration."""

FORMATS["hqq-int4"] = Format(
    layout="hqq",
    engine="hqq",
    env="quantizers",
    parameters="hqq",
    quantizer=("build_hqq.py",),
    costs=Costs(
        Size(0.5, rest=2, group=4, group_size=64),
        QUANTIZER,
        QUANTIZER_CUDA,
        group_size="group_size",
        copies=2,
        like=UNCALIBRATED,
    ),
)
