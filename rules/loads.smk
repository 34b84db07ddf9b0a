"""Servers under loads: one job a server, which restarts it several times."""


def has_loads(cell):
    """Return whether a cell is a server that the study puts under loads."""
    return ENGINES[cell.engine].serves and cells.wants_loads(STUDY)


def burst_tokens(wildcards):
    """Return the prompts of the study's burst, if it has one."""
    return f"artifacts/{wildcards.model}/tokens/burst.json" if STUDY["loads"]["burst"] else []


def plan_loads(wildcards, input):
    """Plan a server's loads."""
    each = cell(wildcards)
    return study_jobs().load(each.artifact, each.engine, shape_of_model(wildcards, input.artifact))


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
    # as for latency: a measurement runs alone
    threads: 1024
    resources:
        **request(plan_loads),
        gpu=lambda wc: cell(wc).gpus,
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
