"""Artifacts that others built, fetched and checked instead of built."""

PREBUILT = {
    (name, artifact): words for name, model in STUDY["models"].items() for artifact, words in model["prebuilt"].items()
}


def prebuilt_env(wildcards):
    """Return the environment of an artifact's engine. An unknown artifact ends Snakemake with one line."""
    return ENGINES[find_cell(wildcards.model, wildcards.artifact).engine].env


def prebuilt_options(wildcards):
    """Return the program's arguments: where an artifact comes from, and its engine."""
    words = PREBUILT[wildcards.model, wildcards.artifact]
    options = [words.get("path", words.get("hub"))]
    options += [f"--{key}={words[key]}" for key in ("revision", "file", "layout") if key in words]
    engine = find_cell(wildcards.model, wildcards.artifact).engine
    options += [f"--format={wildcards.artifact}", f"--engine={engine}"]
    return [*options, f"--engine-python={python(prebuilt_env(wildcards))}"]


def prebuilt_files(wildcards):
    """Return the files of a local artifact. A change of one fetches it again."""
    files = cells.prebuilt_files(PREBUILT[wildcards.model, wildcards.artifact])
    return sorted(name for file in files if file.is_file() and file.name[0] != "." and is_plain(name := str(file)))


def prebuilt_gate(wildcards):
    """Return the gate's flags. GGUF's types are read in llama.cpp's environment."""
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
        **request(plan_build, disk=True),
        gpu=gate_gpus,
        hub=lambda wc: int("hub" in PREBUILT[wc.model, wc.artifact]),
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
