"""autoround-int4 and autoround-awq-int4: AutoRound, stored as GPTQ and as AWQ."""

for name, layout in (("autoround-int4", "gptq"), ("autoround-awq-int4", "awq")):
    FORMATS[name] = Format(
        layout=layout,
        engine="gptqmodel",
        env="quantizers",
        config="autoround",
        program="build.autoround",
        parameters={"layout": layout},
        calibrated=True,
        resources=BuildResources(
            Size(0.5, rest=2, group=2.5, input=4 if layout == "gptq" else 0),
            cpu=Memory(700 + CUDA_BUILD, weights=4, activations=10),
            cuda=SAMPLED_CUDA,
            time=Time(12, block=5, forwards=10),
            group_size="group_size",
            copies=3,
            placements=placement.AUTOROUND,
        ),
    )
