"""From a published checkpoint to the canonical form: source, then safetensors."""

import re

from quantmill.checkpoint import selection

SOURCE_PROGRAMS = {"demo": "fetch.link", "path": "fetch.link", "random": "fetch.random_weights"}
SOURCES = {name: source(model) for name, model in STUDY["models"].items()}  # model -> kind, and path or repository
HUB_MODELS = [name for name, (kind, _) in SOURCES.items() if kind == "hub"]


def source_files(wildcards):
    """Return the files that a source is made of. A change of one rebuilds what was built from it."""
    _, path = SOURCES[wildcards.model]
    files = selection.parts(path) if path.is_dir() else [path]
    return sorted(name for name in map(str, files) if is_plain(name))  # Snakemake cannot take the others


def stat_files(files):
    """Return the size and mtime of each file, following symlinks.

    They are a parameter, because repointing a link to older files does not make an input newer.
    """
    found = {file: Path(file).stat() for file in files}
    return [(file, each.st_size, each.st_mtime_ns) for file, each in found.items()]


def source_env(wildcards):
    """Return the environment of the program that makes a source."""
    return "torch" if SOURCES[wildcards.model][0] == "random" else "tools"


localrules:
    download,


ruleorder: download > source


rule download:
    input:
        env=environment("tools"),
    output:
        intermediate(directory("artifacts/{model}/source")),
    log:
        "artifacts/logs/{model}/source.log",
    wildcard_constraints:
        model="|".join(map(re.escape, HUB_MODELS)) or "(?!)",
    priority: 10
    resources:
        hub=1,
        mem_mb=memory(jobs.DECODING),  # of a source in low bits, which no file says yet
    params:
        program=program("fetch.model"),
        python=python("tools"),
        repository=lambda wc: SOURCES[wc.model][1],
        revision=lambda wc: STUDY["models"][wc.model]["source"]["revision"],
        # a parameter that depends on `threads` is not recorded: another length does not download again
        most_tokens=lambda wc, threads: lengths.most(STUDY),
    shell:
        ASK_THE_HUB + "{params.python:q} {params.program.command:q} {params.repository:q} {output:q}"
        " --revision {params.revision:q} --most-tokens {params.most_tokens:q} 2> {log:q}"


rule source:
    input:
        env=lambda wc: environment(source_env(wc)),
        files=source_files,
    output:
        intermediate(directory("artifacts/{model}/source")),
    log:
        "artifacts/logs/{model}/source.log",
    priority: 10
    resources:
        mem_mb=memory(jobs.RANDOM_WEIGHTS),
    params:
        program=lambda wc: program(SOURCE_PROGRAMS[SOURCES[wc.model][0]]),
        python=lambda wc: python(source_env(wc)),
        path=lambda wc: SOURCES[wc.model][1],
        # the demo's files have the times of their clone, and another clone does not build again
        files=lambda wc: [] if SOURCES[wc.model][0] == "demo" else stat_files(source_files(wc)),
        options=lambda wc: (
            f"--seed={STUDY['seed']}" if source_env(wc) == "torch" else f"--kind={SOURCES[wc.model][0]}"
        ),
    shell:
        "{params.python:q} {params.program.command:q} {params.path:q} {output:q} {params.options:q} 2> {log:q}"


def further_layers(wildcards):
    """Return the flag that keeps multi-token prediction layers, if a run of the study speculates with them."""
    speculates = any(map(vllm_parallelism.speculates_by_itself, STUDY["runs"].values()))
    return ["--further-layers"] if speculates else []


rule tensors:
    input:
        env=environment("torch"),
        source="artifacts/{model}/source",
    output:
        "artifacts/{model}/tensors.json",
    log:
        "artifacts/logs/{model}/tensors.log",
    priority: 10
    resources:
        mem_mb=memory(jobs.NAMING),
        runtime=jobs.LEAST,
    params:
        program=program("fetch.name_tensors"),
        python=python("torch"),
        options=further_layers,
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} {params.options:q} 2> {log:q}"


rule safetensors:
    input:
        env=environment("tools"),
        source="artifacts/{model}/source",
        tensors="artifacts/{model}/tensors.json",
    output:
        intermediate(directory("artifacts/{model}/safetensors")),
    log:
        "artifacts/logs/{model}/safetensors.log",
    priority: 10
    threads: 4
    resources:
        **request(plan_build, disk=True),
    params:
        program=program("checkpoint.to_safetensors"),
        python=python("tools"),
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --tensors {input.tensors:q} --verify --finite"
        " --share 2> {log:q}"


rule bin:
    input:
        env=environment("tools"),
        source="artifacts/{model}/safetensors",
    output:
        directory("artifacts/{model}/bin"),
    log:
        "artifacts/logs/{model}/bin.log",
    threads: 4
    resources:
        **request(plan_build, disk=True),
    params:
        program=program("checkpoint.to_bin"),
        python=python("tools"),
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --verify --share 2> {log:q}"
