"""hqq-int4: HQQ, four bits with a float zero point for each group, without calibration."""

FORMATS["hqq-int4"] = Format(
    layout="hqq",
    engine="hqq",
    env="quantizers",
    program="build.hqq",
    config="hqq",
    resources=BuildResources(
        Size(0.5, rest=2, group=4, group_size=64),
        ROUNDED,
        Memory(2000, weights=1.2),  # of 135M, 1.1B and 7B on an H200
        Time(5, ns=2, flop=45e3),
        group_size="group_size",
        copies=2,
    ),
)
