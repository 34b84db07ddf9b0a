"""Tasks of lm-evaluation-harness: their documents once for a study, then the answers of every cell."""

TASKS = STUDY["tasks"]
HARNESS = "lm-eval"  # the environment


def has_tasks(cell):
    """Return whether a cell is evaluated on tasks; random weights are not."""
    return bool(TASKS["names"]) and has_quality(cell.model)


def own_tasks():
    """Files of the user's own tasks and data. An edit of one runs all tasks again."""
    folder = Path(TASKS["include"]) if "include" in TASKS else None
    files = sorted(map(str, filter(Path.is_file, folder.rglob("*")))) if folder else []
    return [name for name in files if is_plain(name)]  # Snakemake cannot take other names


def task_ask(wildcards, input):
    """Resources of the job that runs a cell's tasks. The time depends on the documents, known once they are fetched."""
    each, counts = cell(wildcards), []
    for folder in input.documents:
        facts = local_path(folder) / "documents.json"
        sizes = json.loads(facts.read_text())["documents"].values() if facts.exists() else [None]
        counts += [size and min(size, TASKS.get("limit", size)) for size in sizes]
    documents = None if None in counts else sum(counts)
    return study_jobs().tasks(each.artifact, each.engine, shape_of_cell(wildcards, input), documents)


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
        mem_mb=jobs.job_mb(jobs.DOCUMENTS),
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
    priority: 0  # after quality and speed, which find faults sooner
    threads: 8
    resources:
        gpu=lambda wc: cell(wc).gpus,
        mem_mb=lambda wc, input: task_ask(wc, input).mb,
        runtime=lambda wc, input: task_ask(wc, input).minutes,
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
