"""Upload a study's artifacts to the hub. `snakemake publish` does it; the report never depends on it."""

from quantmill.plan import publications

PUBLICATIONS = {(each.model, each.name): each for each in publications.of_study(STUDY, REGISTRY)}


def receipts(wildcards):
    """Return the local record of each upload. A study that publishes nothing ends Snakemake with one line."""
    if not PUBLICATIONS:
        refuse("the config publishes nothing; add publish: {repository: ORG/{model}-{format}, formats: [...]}")
    return [f"artifacts/{model}/published/{name}.json" for model, name in PUBLICATIONS]


def publication(wildcards):
    """Return the repository of a receipt."""
    if (wildcards.model, wildcards.publication) not in PUBLICATIONS:
        refuse(
            f"artifacts/{wildcards.model}: the config publishes no {wildcards.publication}; add it to publish.formats"
        )
    return PUBLICATIONS[wildcards.model, wildcards.publication]


def licence_source(wildcards):
    """Return the checkpoint as published, which names its licence, unless the study does."""
    return [] if "license" in STUDY["publish"] else f"artifacts/{wildcards.model}/source"


def push_options(wildcards, input):
    """Return the repository and the terms as flags of the program."""

    each, words = publication(wildcards), STUDY["publish"]
    options = [f"--repository={each.repository}", f"--model={each.model}", f"--layout={each.layout}"]
    options += [f"--library={LAYOUTS[each.layout].hub_library}"]
    options += [f"--source={input.source}"] if input.source else []
    options += [f"--license={words['license']}"] if "license" in words else []
    options += [f"--base-model={words['base_model']}"] if "base_model" in words else []
    return options + [
        f"--{flag}" for flag, on in (("public", not words["private"]), ("overwrite", words["overwrite"])) if on
    ]


localrules:
    publish,
    push,


rule publish:
    input:
        receipts,


rule push:
    input:
        env=environment("tools"),
        artifacts=lambda wc: [f"artifacts/{wc.model}/{name}" for name in publication(wc).artifacts],
        results="artifacts/report/results.json",
        source=licence_source,
    output:
        "artifacts/{model}/published/{publication}.json",
    log:
        "artifacts/logs/{model}/publish-{publication}.log",
    wildcard_constraints:
        publication=rf"{registry.NAME}|{publications.GGUF}",
    resources:
        hub=1,
        mem_mb=memory(jobs.PUBLISHING),
    params:
        program=program("publish.push", *(PACKAGE / "publish").glob("*.j2")),
        python=python("tools"),
        options=push_options,
    shell:
        ASK_THE_HUB
        + "{params.python:q} {params.program.command:q} {output:q} {input.artifacts:q} --results {input.results:q}"
        " {params.options:q} 2> {log:q}"
