"""Texts become token ids once a model, by its own tokenizer; no engine ever sees a text."""


rule tokens:
    input:
        program=program("tokenize_texts.py"),
        env=environment("torch"),
        model="artifacts/{model}/safetensors",
        text=lambda wc: STUDY["texts"][wc.text],
    output:
        "artifacts/{model}/tokens/{text}.json",
    log:
        "artifacts/logs/{model}/tokens-{text}.log",
    params:
        python=python("torch"),
        kind=lambda wc: "prompts" if wc.text == "prompts" else "document",
    shell:
        "{params.python:q} {input.program[0]} {input.model} {input.text:q} {output} --as {params.kind} 2> {log}"
