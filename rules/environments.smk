"""Environments: one virtual environment for each pinned file, built once and shared by all jobs."""


localrules:
    environment,


rule environment:
    input:
        pins=str(CHECKOUT / "envs/{env}.txt"),
        # an edit of the builder does not invalidate environments
        script=ancient(str(PACKAGE / "environments/create.py")),
    output:
        directory(str(CHECKOUT / "envs/{env}")),
    log:
        "artifacts/logs/envs/{env}.log",
    priority: lambda wc: 1000 if wc.env in {"tools", ENGINES[REFERENCE_ENGINE].env} else 0
    threads: 4  # uv uses several; and on two cores no environment delays what the first rows need
    # no parameter: another checkout's Python must not rebuild environments and all artifacts
    shell:
        "{sys.executable:q} {PACKAGE:q} environments.create {input.pins:q} {output:q} 2> {log:q}"
