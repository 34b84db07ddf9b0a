"""exl3-4.0bpw and other rates: ExLlamaV3's trellis codes, calibrated; on NVIDIA GPUs only."""

EXLLAMAV3 = "artifacts/libraries/exllamav3"
# One module at a time, and the samples' activations. Measured only with the demo, whose build took 1,930 MB
EXL3_MEMORY = Memory(1950, tables=2, block=4, activations=8, least=2000)

COMPILED["exllamav3"] = [EXLLAMAV3]
for rate in (quarters / 4 for quarters in range(4, 33)):  # 1.0 to 8.0
    FORMATS[f"exl3-{rate}bpw"] = Format(
        layout="exl3",
        engine="exllamav3",
        env="exllamav3",
        program="build.exl3",
        config="exl3",
        parameters={"bits": rate},
        calibrated=True,
        devices=("cuda",),
        resources=BuildResources(
            Size(rate / 8, rest=2, row=2, input=2, head=6 / 8),
            EXL3_MEMORY,
            EXL3_MEMORY,
            forwards=4,
            copies=3,
            like=("gptq-int4", "awq-int4"),
        ),
    )


rule exllamav3:
    input:
        environment("exllamav3", compiled=False),
    output:
        directory(EXLLAMAV3),
    log:
        "artifacts/logs/libraries/exllamav3.log",
    threads: 16
    resources:
        gpu=1,  # it compiles for the visible GPUs
        mem_mb=lambda wc, threads: 1500 * threads,
        runtime=180,
    params:
        program=program("exllamav3.compile"),
        python=python("exllamav3"),
    shell:
        "{params.python:q} {params.program.command:q} {output:q} --threads {threads} > {log:q} 2>&1"
