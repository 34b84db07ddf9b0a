"""Servers under loads: one job for each server, which starts it several times."""


def has_loads(cell):
    """Return whether a cell is a server and the study has loads."""
    return ENGINES[cell.engine].serves and cells.wants_loads(STUDY)


def burst_tokens(wildcards):
    """The prompts of the burst, if the study has one."""
    return f"artifacts/{wildcards.model}/tokens/burst.json" if STUDY["loads"]["burst"] else []


def load_ask(wildcards, input):
    """Resources of a server's job."""
    each = cell(wildcards)
    return study_jobs().load(each.artifact, each.engine, shape_of_cell(wildcards, input))


rule loads:
    input:
        env=lambda wc: environment(ENGINES[cell(wc).engine].env),
        artifact=lambda wc: f"artifacts/{wc.model}/{cell(wc).artifact}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        burst=burst_tokens,
    output:
        "artifacts/{model}/loads/{cell}.json",
        "artifacts/{model}/loads/{cell}.npz",
    log:
        "artifacts/logs/{model}/loads-{cell}.log",
    priority: 100
    # as for latency: nothing else runs during a measurement
    threads: 1024
    resources:
        gpu=lambda wc: cell(wc).gpus,
        mem_mb=lambda wc, input: load_ask(wc, input).mb,
        runtime=lambda wc, input: load_ask(wc, input).minutes,
    params:
        run=lambda wc: cell_runner("loads.measure", wc),
        device=STUDY["device"],
        loads=json.dumps(STUDY["loads"], sort_keys=True),
        seed=STUDY["seed"],
        burst=lambda wc, input: [f"--burst={file}" for file in [input.burst] if file],
    shell:
        "{params.run[python]:q} {params.run[program]:q} {input.artifact:q} {output[0]:q} {params.run[arguments]:q}"
        " --loads {params.loads:q} --evaluation {input.evaluation:q} {params.burst:q} --seed {params.seed:q}"
        " --device {params.device:q} --threads {threads} 2> {log:q}"
