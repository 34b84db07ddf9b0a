#!/usr/bin/env python3
"""Take somebody else's artifact of a model: check that it is this model's, and record where it came from.

    python scripts/fetch_prebuilt.py (FOLDER | ORGANISATION/NAME --revision COMMIT) DST --model MODEL --layout gptq
        --format NAME --engine gptqmodel [--engine-python PYTHON]

MODEL is the folder of this model's safetensors. The layout is gptq, awq or ct2. Files of a folder are linked, those of
the hub fetched at one commit, with their hashes checked; the hashes of a quantmill.json that lies beside them are
checked as well. Nothing of it is changed, and no code of it is run. The quality gate then runs it like any other.
"""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint import ctranslate2_bin, same_model, shards
from checkpoint.selection import select
from common import hub, manifest
from common.program import UserError, parser, printable, run
from common.publish import MANIFEST, place, publish
from scoring import quality_gate

VOCABULARY = "vocabulary.json"  # the engine takes tokens by it; older converters wrote others
CT2_FILES = ("model.bin", "config.json", VOCABULARY)
QUANTIZE_CONFIG = "quantize_config.json"  # where auto-gptq reads what the others have in config.json
MAX_WORD = 100  # letters
PARAMETERS = ("bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "zero_point", "version")


def of_folder(folder: Path, layout: str) -> tuple[dict[str, Path], dict[str, Any]]:
    """The files of a local artifact, and its source for the manifest. Raises `UserError` where hashes differ."""
    if layout == "ct2":
        names = [name for name in CT2_FILES if (folder / name).is_file()]
        files = [shards.check_inside(folder, folder / name) for name in names]
    else:
        found = shards.find(folder)
        files = [*found.files, *filter(None, [found.index()]), *found.others()]
        files += [path for path in [folder / QUANTIZE_CONFIG] if path.is_file()]
    if (folder / MANIFEST).is_file():
        recorded = manifest.read(folder).get("files")
        if not isinstance(recorded, dict) or not all(isinstance(each, dict) for each in recorded.values()):
            raise UserError(f"{folder / MANIFEST}: names no files with their hashes; remove it")
        for file in files:
            if file.name in recorded and manifest.sha256(file) != recorded[file.name].get("sha256"):
                raise UserError(f"{file}: has not the SHA-256 that {MANIFEST} beside it names; fetch it again")
    return {file.name: file for file in files}, {"kind": "path", "path": str(folder), "commit": None}


def of_hub(name: str, revision: str, layout: str) -> tuple[dict[str, Path], dict[str, Any]]:
    """The same of a repository of the hub, at one commit."""
    repository = hub.resolve(name, revision)
    if layout == "ct2":
        names = [name for name in CT2_FILES if name in repository.files]
    else:
        names = select(repository.name, repository.files)
    files = hub.fetch(repository, names)
    return files, {"kind": "hub", "hub": repository.name, "revision": revision, "commit": repository.commit}


def quantization(folder: Path, layout: str) -> dict[str, Any]:
    """What a GPTQ or AWQ folder says of its weights. Raises `UserError` where that is another layout."""
    found = shards.read_config(folder / "config.json").get("quantization_config")
    if not isinstance(found, dict):
        raise UserError(
            f"{folder}: its config.json has no quantization_config; where {QUANTIZE_CONFIG} says it, put that there"
        )
    if (folder / QUANTIZE_CONFIG).is_file():
        other = shards.read_json(folder / QUANTIZE_CONFIG)
        if wrong := [name for name in PARAMETERS if name in found and name in other and found[name] != other[name]]:
            raise UserError(
                f"{folder}: config.json and {QUANTIZE_CONFIG} name another {wrong[0]}; one of them is wrong"
            )
    method = found.get("quant_method")
    if method != layout:
        raise UserError(f"{folder}: its quantization_config says {method!r}, not {layout!r}; name its own layout")
    return found


def check_packed(folder: Path, options: Namespace) -> dict[str, Any]:
    """Hold a GPTQ or AWQ folder against the model; its weights' facts for the manifest."""
    same_model.check_config(folder, options.model)
    theirs, ours = (same_model.tokens(each / same_model.TOKENIZER) for each in (folder, options.model))
    if theirs and ours:
        same_model.check_tokens(folder, theirs, ours)
    found = shards.find(folder)
    if found.form != "safetensors":
        raise UserError(f"{folder}: its weights are pickled ({found.form}); name an artifact with safetensors")
    words = quantization(folder, options.layout)
    stored = same_model.check_packed(folder, options.layout, words, shards.find(options.model))
    table = stored["model.embed_tokens.weight"].nbytes if "lm_head.weight" in stored else 0
    return {
        "parameters": {name: words[name] for name in PARAMETERS if name in words and is_plain(words[name])},
        "weight_files": [file.name for file in found.files],
        "weight_bytes_per_token": sum(tensor.nbytes for tensor in stored.values()) - table,
    }


def check_ct2(folder: Path, options: Namespace) -> dict[str, Any]:
    """The same of a CTranslate2 folder, whose config.json tells nothing of the model's sizes."""
    variables = ctranslate2_bin.read(folder / "model.bin")
    config = shards.read_config(options.model / "config.json")
    embeddings = variables.get("decoder/embeddings/weight")
    layers = {name.split("/")[1] for name in variables if name.startswith("decoder/layer_")} - {"layer_norm"}
    found = [*(embeddings.shape if embeddings else ()), len(layers)]
    expected = [config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")]  # GPT-2 has others
    if len(found) != 3 or any(mine not in (None, theirs) for mine, theirs in zip(expected, found, strict=True)):
        raise UserError(
            f"{folder}: is another model: vocabulary, width and layers are {found}, this model's {expected}"
        )
    shards.read_json(folder / "config.json")  # the engine reads it
    if not (folder / VOCABULARY).is_file():
        raise UserError(f"{folder}: holds no {VOCABULARY}; convert the model with CTranslate2 4")
    words = shards.read_list(folder / VOCABULARY, same_model.MAX_TOKENIZER)
    ours = same_model.tokens(options.model / same_model.TOKENIZER)
    if ours:
        same_model.check_tokens(folder, {number: words[number] for number in ours if number < len(words)}, ours)
    types = sorted({variable.dtype for variable in variables.values() if len(variable.shape) == 2})
    return {
        "parameters": {"weights": ", ".join(types)},
        "weight_files": ["model.bin"],
        "weight_bytes_per_token": ctranslate2_bin.bytes_per_token(variables),
    }


def gate_layout(folder: Path, layout: str) -> str | None:
    """The module of scripts/layouts that reads the weights; those that are not quantized are the source's own. None of
    integers that we do not read."""
    if layout != "ct2":
        return layout
    variables = ctranslate2_bin.read(folder / "model.bin").values()
    integers = {variable.dtype for variable in variables if len(variable.shape) == 2 and "int" in variable.dtype}
    return "source" if not integers else "ct2" if integers == {"int8"} else None


def is_plain(value: Any) -> bool:
    """Whether a stranger's parameter is one that the report can show: a number, yes or no, or a short word."""
    return isinstance(value, int) or (isinstance(value, str) and len(value) <= MAX_WORD and value.isprintable())


def tool(words: Mapping[str, Any]) -> str:
    """What built an artifact, as far as it says so."""
    meta = words.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    return printable(", ".join(map(str, named))[:MAX_WORD]) if isinstance(named, list) and named else "unknown"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", help="a folder, or with --revision a repository of the hub")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--revision", help="branch, tag or commit")
    arguments.add_argument("--model", type=Path, required=True, help="folder of this model's safetensors")
    arguments.add_argument("--layout", choices=["gptq", "awq", "ct2"], required=True)
    arguments.add_argument("--format", required=True, help="its name in the study")
    arguments.add_argument("--engine", required=True, help="what runs it")
    arguments.add_argument("--engine-python", help="the interpreter that has the engine")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda: where the quality gate runs it")
    quality_gate.add_arguments(arguments)
    options = arguments.parse_args()
    options.src = options.model

    if options.revision:
        files, source = of_hub(options.artifact, options.revision, options.layout)
    else:
        files, source = of_folder(Path(options.artifact), options.layout)
    with publish(options.dst) as folder:
        folder.mkdir()
        for name, path in files.items():
            place(path, folder / name)
        try:
            facts = (check_ct2 if options.layout == "ct2" else check_packed)(folder, options)
            words = {} if options.layout == "ct2" else quantization(folder, options.layout)
        except UserError as error:  # where it came from: this folder is gone when the line is read
            raise UserError(str(error).replace(str(folder), options.artifact)) from None
        layout = gate_layout(folder, options.layout)
        gate = quality_gate.check(folder, options.engine, layout, options.device, options, options.engine_python)
        hashes = {name: manifest.sha256(folder / name) for name in facts["weight_files"]}
        manifest.write(
            folder,
            format=options.format,
            engine=options.engine,
            tool=tool(words),
            tool_version="unknown",
            source=source | {"sha256": hashes},
            parameter_count=manifest.read(options.model)["parameter_count"],
            gate=gate,
            hashes=hashes,
            prebuilt=True,
            **facts,
        )


if __name__ == "__main__":
    run(main)
