"""autoround-int4 and autoround-awq-int4: AutoRound, stored as GPTQ and as AWQ."""

# The whole model in float32, and of one block what its steps keep for the backward pass
LEARNT = Memory(620 + CUDA_BUILD, weights=8, block=24, activations=24, attention=16)

for name, layout in (("autoround-int4", "gptq"), ("autoround-awq-int4", "awq")):
    FORMATS[name] = Format(
        layout=layout,
        engine="gptqmodel",
        env="quantizers",
        config="autoround",
        program="build.autoround",
        parameters={"layout": layout},
        calibrated=True,
        # 200 steps of 8 samples, forward and back, are 37 forwards over 128 samples
        resources=BuildResources(
            Size(0.5, rest=2, group=2.5, input=4 if layout == "gptq" else 0),
            LEARNT,
            QUANTIZER_CUDA,
            forwards=40,
            group_size="group_size",
            copies=3,
            like=("gptq-int4", "awq-int4"),
        ),
    )
