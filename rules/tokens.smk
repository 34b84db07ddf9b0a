"""Tokenize each text once per model, with the model's tokenizer; engines get ids and never a text."""


def text_of(model, kind):
    """Path of a model's text of a kind: the user's file, or one fetched from the Hub."""
    text = STUDY["models"][model]["texts"][kind]
    return f"artifacts/texts/{kind}" if isinstance(text, dict) else text


def hub_text(kind):
    """The text of a kind from the Hub; all models that use one use the same."""
    texts = [model["texts"][kind] for model in STUDY["models"].values() if isinstance(model["texts"][kind], dict)]
    return texts[0] if texts else refuse(f"artifacts/texts/{kind}: the study takes no {kind} text from the hub")


localrules:
    text,


rule text:
    input:
        env=environment("tools"),
    output:
        directory("artifacts/texts/{text}"),
    log:
        "artifacts/logs/texts/{text}.log",
    priority: 10
    resources:
        hub=1,
    params:
        program=program("fetch.text"),
        python=python("tools"),
        repository=lambda wc: hub_text(wc.text)["hub"],
        file=lambda wc: hub_text(wc.text)["file"],
        options=lambda wc: [
            f"--{key}={hub_text(wc.text)[key]}"
            for key in ("revision", "column", "documents", "join")
            if key in hub_text(wc.text)
        ],
    shell:
        ASK_THE_HUB + "{params.python:q} {params.program.command:q} {params.repository:q} {params.file:q} {output:q}"
        " {params.options:q} 2> {log:q}"


rule tokens:
    input:
        env=environment("torch"),
        model="artifacts/{model}/safetensors",
        text=lambda wc: text_of(wc.model, wc.text),
    output:
        "artifacts/{model}/tokens/{text}.json",
    log:
        "artifacts/logs/{model}/tokens-{text}.log",
    priority: lambda wc: 0 if wc.text == "calibration" else 10
    resources:
        mem_mb=memory(jobs.TOKENIZING),
    params:
        program=program("tokens.tokenize_texts"),
        python=python("torch"),
        kind=lambda wc: {"calibration": "document", "burst": "prompts"}.get(wc.text, wc.text),
    shell:
        "{params.python:q} {params.program.command:q} {input.model:q} {input.text:q} {output:q} --as {params.kind:q}"
        " 2> {log:q}"
