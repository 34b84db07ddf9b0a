"""Somebody else's artifacts of a model, fetched and checked instead of built."""

PREBUILT = {
    (name, artifact): words for name, model in STUDY["models"].items() for artifact, words in model["prebuilt"].items()
}


def prebuilt_env(wildcards):
    """The environment of what runs an artifact; one that the model does not have ends Snakemake with one line."""
    return ENGINES[find_cell(wildcards.model, wildcards.artifact).engine].env


def prebuilt_options(wildcards):
    """Where an artifact comes from and what runs it, as the program's flags."""
    words = PREBUILT[wildcards.model, wildcards.artifact]
    engine = find_cell(wildcards.model, wildcards.artifact).engine
    options = [words.get("path", words.get("hub"))]
    options += [f"--{key}={words[key]}" for key in ("revision", "file") if key in words]
    options += [
        f"--layout={words['layout']}",
        f"--format={wildcards.artifact}",
        f"--engine={engine}",
    ]
    return [*options, f"--engine-python={python(prebuilt_env(wildcards))}"]


def prebuilt_files(wildcards):
    """The files of a local artifact: when one changes, it is fetched again."""
    files = cells.prebuilt_files(PREBUILT[wildcards.model, wildcards.artifact])
    return sorted(name for file in files if file.is_file() and file.name[0] != "." and is_plain(name := str(file)))


def prebuilt_gate(wildcards):
    """What the gate needs, as flags: llama.cpp's types are read in its own environment."""
    layout = PREBUILT[wildcards.model, wildcards.artifact]["layout"]
    return gate_options(wildcards, "llama_cpp" if layout == "gguf" else "torch")


rule prebuilt:
    input:
        env=lambda wc: [*environment("tools"), *environment(prebuilt_env(wc))],
        files=prebuilt_files,
        source="artifacts/{model}/safetensors",
        gate=gate_input,
    output:
        directory("artifacts/{model}/{artifact}"),
    log:
        "artifacts/logs/{model}/{artifact}.log",
    wildcard_constraints:
        artifact="|".join(sorted({re.escape(artifact) for _, artifact in PREBUILT})) or "(?!)",
    priority: 10
    resources:
        gpu=gate_gpus,
        hub=lambda wc: int("hub" in PREBUILT[wc.model, wc.artifact]),
        mem_mb=build_memory,
        disk_mb=build_disk,
        runtime=build_minutes,
    params:
        program=program(
            "fetch.prebuilt", *(PACKAGE / "layouts").glob("*.py"), *(PACKAGE / "fetch/prebuilt_layouts").glob("*.py")
        ),
        python=python("tools"),
        device=lambda wc: STUDY["device"],
        options=prebuilt_options,
        files=lambda wc: stat_files(prebuilt_files(wc)),
        gate=prebuilt_gate,
    shell:
        ASK_THE_HUB
        + "{params.python:q} {params.program.command:q} {params.options:q} {output:q} --model {input.source:q}"
        " --device {params.device:q} {params.gate:q} 2> {log:q}"
