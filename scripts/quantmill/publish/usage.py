"""Text for running a published artifact as it was measured: a server's command line, or some Python for a library."""

import json
import re
import shlex
from collections.abc import Mapping
from string import Template
from typing import Any

from quantmill.common.program import printable
from quantmill.deploy.deployment import PORT, command_line
from quantmill.engines.served.started import Deployable, deployable, underscored
from quantmill.llamacpp import files
from quantmill.publish.contents import Artifact
from quantmill.servers import vllm_settings
from quantmill.servers.endpoint import Endpoint

LOCAL = "127.0.0.1"
GENERATE = """
inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"""
TRANSFORMERS = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("$repository")
model = AutoModelForCausalLM.from_pretrained("$repository", dtype="$dtype"$options).to("$device")
{GENERATE.strip()}"""
QUANTIZED = TRANSFORMERS.replace('dtype="$dtype"$options).to("$device")', 'device_map="$device"$options)')
GPTQMODEL = f"""
from gptqmodel import GPTQModel
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("$repository")
model = GPTQModel.load("$repository", device="$device"$options).model
{GENERATE.strip()}"""
# engine -> Python for its library, a template of `values`
PYTHON = {
    "transformers": TRANSFORMERS,
    **dict.fromkeys(("bitsandbytes", "torchao", "compressed-tensors"), QUANTIZED),
    "gptqmodel": GPTQMODEL,
    "vllm": """
from vllm import LLM, SamplingParams
llm = LLM("$repository"$options)
print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)""",
    "ctranslate2": """
import ctranslate2
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer
folder = snapshot_download("$repository")
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
generator = ctranslate2.Generator(folder, device="$device"$options)
tokens = tokenizer.encode("Once upon a time").tokens
print(tokenizer.decode(generator.generate_batch([tokens], max_length=32)[0].sequences_ids[0]))""",
    "exllamav3": """
from exllamav3 import Cache, Config, Generator, Model, Tokenizer
from huggingface_hub import snapshot_download
config = Config.from_directory(snapshot_download("$repository"))
model = Model.from_config(config)
cache = Cache(model, max_num_tokens=8192)
model.load()
generator = Generator(model=model, cache=cache, tokenizer=Tokenizer.from_config(config))
print(generator.generate(prompt="Once upon a time", max_new_tokens=32))""",
    "llama_cpp": """
from llama_cpp import Llama
model = Llama.from_pretrained("$repository", filename="$file", n_gpu_layers=$layers$options)
print(model("Once upon a time", max_tokens=32)["choices"][0]["text"])""",
}
# what measured it is not what people load it with
OTHERS = {
    "quantmill-tvm": "Measured with Quantmill's own kernels, which are not MLC-LLM's. MLC-LLM, which was not measured, "
    "loads the weights as `HF://$repository`.",
    "mlc_llm": "In MLC-LLM the model is called `HF://$repository`.",
}


def describe(row: Mapping[str, Any], artifact: Artifact, repository: str) -> str:
    """Return Markdown for running an artifact in the engine of a measured row from `public.row`."""
    options = dict(row["options"])
    environment = options.pop("environment", {})
    row = {**row, "options": options}
    device = (row["device_details"] or {}).get("device", "cpu")
    arguments = (row["versions"] or {}).get("arguments", "")  # of a server that Quantmill started
    if arguments and (kind := deployable(row["engine"])):
        line = server_command(kind, row, artifact, repository, device, environment)
        return block("sh", f"{download(artifact, repository)}\n{line}")
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    said = f"Measured with `{variables}` in the environment.\n\n" if variables else ""
    return said + by_library(row, artifact, repository, device)


def by_library(row: Mapping[str, Any], artifact: Artifact, repository: str, device: str) -> str:
    """Do the same for an engine that is not a server of `make serve-command`."""
    engine = row["engine"]
    said, left = python_options(row, artifact, device)
    values = {
        "repository": repository,
        "file": next(iter(artifact.files)),
        "device": device,
        "dtype": row["compute_type"] or "auto",
        "options": "".join(f", {name}={value!r}" for name, value in said.items()),
        "layers": -1 if device == "cuda" else 0,
    }
    if engine in PYTHON:
        more = f"\n\nMeasured with the options `{json.dumps(left)}`, in the engine's words." if left else ""
        return block("python", Template(PYTHON[engine]).substitute(values).strip()) + more
    if engine in OTHERS:
        return Template(OTHERS[engine]).substitute(values)
    if arguments := (row["versions"] or {}).get("arguments"):  # a server that Quantmill started
        return block("sh", f"{download(artifact, repository)}\npython3 {arguments.replace('PORT', str(PORT))}")
    options = f", with the options `{json.dumps(row['options'])}`" if row["options"] else ""
    return f"Measured in {printable(engine)}{options}. Its own manual says how it loads a model of the hub."


def python_options(row: Mapping[str, Any], artifact: Artifact, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's options as arguments of the library, and those that it takes in another form."""
    options, engine = dict(row["options"]), row["engine"]
    if engine == "vllm":
        return vllm_settings.settings(artifact.folder, options, row["gpus"] if device == "cuda" else 0), {}
    if engine == "llama_cpp":
        same = {name: value for name, value in options.items() if name in ("n_batch", "n_ubatch")}
        return same, {name: value for name, value in options.items() if name not in same}
    return {name: value for name, value in options.items() if name != "dtype"}, {}  # the row's compute type says it


def download(artifact: Artifact, repository: str) -> str:
    """Return the command that downloads an artifact; a GGUF repository holds several."""
    file = next((f" {name}" for name in artifact.files if name.endswith(".gguf")), "")
    return f"hf download {repository}{file} --local-dir {artifact.name}"


def server_command(
    kind: type[Deployable],
    row: Mapping[str, Any],
    artifact: Artifact,
    repository: str,
    device: str,
    environment: Mapping[str, str],
) -> str:
    """Return the command line of a server with the options that were measured, as `make serve-command` prints it."""
    cards = row["gpus"] if device == "cuda" else 0
    threads = re.search(r"--threads (\d+)", row["versions"]["arguments"])
    place = Endpoint(artifact.name, repository, LOCAL, PORT)
    options = underscored(dict(row["options"]))
    words = kind.words(artifact.folder, place, cards, int(threads[1]) if threads else row["threads"] or 1, options)
    name = next(iter(artifact.files))
    words = [word.replace(f"{artifact.name}/{files.MODEL}", f"{artifact.name}/{name}") for word in words]
    return command_line(kind.program, words, {**kind.variables(cards), **environment})


def block(language: str, content: str) -> str:
    """Return a fenced block of Markdown."""
    return f"```{language}\n{content}\n```\n".rstrip()
