"""exl3-4.0bpw and other rates: ExLlamaV3's trellis codes, calibrated; on NVIDIA GPUs only."""

EXLLAMAV3 = "artifacts/libraries/exllamav3"
EXL3_MEMORY = Memory(2000, weights=0.5, activations=8)  # measured with the demo alone, whose build took 1,930 MB

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
            Time(12, ns=50, block=1.7, forwards=4),
            copies=3,
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
