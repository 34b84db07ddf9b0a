"""Tasks of lm-evaluation-harness: their documents once for a study, then the answers of every cell."""

TASKS = STUDY["tasks"]
HARNESS = "lm-eval"  # the environment


def has_tasks(cell):
    """Return whether a cell runs tasks: random weights do not."""
    return bool(TASKS["names"]) and has_quality(cell.model)


def own_tasks():
    """List the user's own tasks and their data: if one changes, all tasks run again."""
    folder = Path(TASKS["include"]) if "include" in TASKS else None
    files = sorted(map(str, filter(Path.is_file, folder.rglob("*")))) if folder else []
    return [name for name in files if is_plain(name)]  # Snakemake does not accept other names


def plan_tasks(wildcards, input):
    """Plan a cell's tasks; the number of documents is known once they are fetched."""
    each, counts = cell(wildcards), []
    for folder in input.documents:
        facts = local_path(folder) / "documents.json"
        sizes = json.loads(facts.read_text())["documents"].values() if facts.exists() else [None]
        counts += [size and min(size, TASKS.get("limit", size)) for size in sizes]
    documents = None if None in counts else sum(counts)
    return study_jobs().tasks(each.artifact, each.engine, shape_of_model(wildcards, input.artifact), documents)


localrules:
    task_documents,


rule task_documents:
    input:
        env=environment(HARNESS),
        own=own_tasks(),
    output:
        directory("artifacts/texts/tasks/{task}"),
    log:
        "artifacts/logs/texts/tasks/{task}.log",
    wildcard_constraints:
        task=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    priority: 10
    resources:
        hub=1,
        mem_mb=memory(jobs.DOCUMENTS),
    params:
        program=program("tasks.fetch_documents"),
        python=python(HARNESS),
        include=[f"--include={TASKS['include']}"] if "include" in TASKS else [],
    shell:
        ASK_THE_HUB
        + "{params.python:q} {params.program.command:q} {wildcards.task:q} {output:q} {params.include:q} 2> {log:q}"


rule tasks:
    input:
        env=lambda wc: environment(ENGINES[cell(wc).engine].env),
        harness=environment(HARNESS),
        artifact=lambda wc: f"artifacts/{wc.model}/{cell(wc).artifact}",
        model="artifacts/{model}/safetensors",  # its config and tokenizer make the requests
        documents=[f"artifacts/texts/tasks/{name}" for name in TASKS["names"]],
    output:
        "artifacts/{model}/tasks/{cell}.json",
    log:
        "artifacts/logs/{model}/tasks-{cell}.log",
    priority: 0  # after quality and speed, which show mistakes sooner
    threads: 8
    resources:
        **request(plan_tasks),
        gpu=lambda wc: cell(wc).gpus,
    params:
        program=program("tasks.measure"),
        python=python(HARNESS),
        run=lambda wc: cell_runner("tasks.worker", wc),
        device=STUDY["device"],
        tasks=json.dumps(TASKS, sort_keys=True),
        seed=STUDY["seed"],
        texts=lambda wc: ["--texts"] if wc.cell == STUDY["reference"] else [],
    shell:
        "{params.python:q} {params.program.command:q} {input.artifact:q} {output:q} {params.run[arguments]:q}"
        " --python {params.run[python]:q} --model {input.model:q} --tasks {params.tasks:q}"
        " --documents {input.documents:q} --seed {params.seed:q} {params.texts:q} --device {params.device:q}"
        " --threads {threads} 2> {log:q}"
