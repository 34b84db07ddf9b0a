"""The model card, as the hub's own parsers read it, and the study that is published with it."""

import json
import subprocess

import yaml
from published_study import Study

QUALITIES = {"perplexity", "kld_mean", "top1_agreement"}  # in the head of a row without a speed
COMPILE = "import sys; compile(sys.stdin.read(), 'snippet', 'exec')"
SOURCE = {
    "kind": "hub",
    "hub": "acme/base",
    "revision": "main",
    "commit": "c" * 40,
    "sha256": {"model.safetensors": "e"},
}


def test_the_head_holds_the_rows_figures(study: Study) -> None:
    study.build("gptq-int4", {"model.safetensors": 9}, source=SOURCE)
    found = study.head(study.published("gptq-int4")["README.md"])
    expected = {"base_model": "acme/base", "base_model_relation": "quantized", "license": "apache-2.0"}
    assert found["head"].items() >= (expected | {"library_name": "transformers"}).items()
    row = study.row("gptq-int4")
    figures = {each["metric_type"]: each for each in found["results"]}
    names = ("perplexity", "kld_mean", "top1_agreement", "tokens_per_second", "ttft_ms_p50", "tpot_ms_p50")
    assert {name: each["metric_value"] for name, each in figures.items()} == {name: row[name] for name in names}
    quality, speed = figures["perplexity"]["metric_args"], figures["tokens_per_second"]["metric_args"]
    assert quality["text_sha256"] == row["protocol"]["quality"]["text_sha256"]
    assert (speed["device"], speed["new_tokens"]) == (row["device"], 200)
    assert {each["task_type"] for each in found["results"]} == {"text-generation"}


def test_the_card_has_measurements_and_the_build_command(study: Study) -> None:
    study.build("gptq-int4", {"model.safetensors": 9}, source=SOURCE)
    files = study.published("gptq-int4")
    card, row = files["README.md"].decode(), study.row("gptq-int4")
    assert f"Measured on {row['device']}; batch 1, 200 new tokens after each prompt, 2 processes, 2 repeats" in card
    assert "perplexity by gptq-2048, 30 windows of up to 512 tokens" in card
    line = "| `gptq-int4` | gptqmodel, bfloat16, 2 threads | 268 (256 to 281) | 46.55 | 1.0112 (1.0068 to 1.0157) |"
    assert line in card  # as in the README's table, made from the same results
    assert f"[acme/base](https://huggingface.co/acme/base) at commit `{'c' * 40}`" in card
    assert f"SHA-256 `{row['artifact']['calibration_sha256']}`, 16 samples, 512 tokens each" in card
    assert "snakemake --cores 8 artifacts/demo/gptq-int4 --configfile study.yaml" in card
    assert "![Quality over speed of all formats of this model](quality-speed.png)" in card
    for name, words in json.loads(files["quantmill.json"])["files"].items():
        if name != "README.md":
            assert f"| `{name}` | {words['bytes']} | `{words['sha256']}` |" in card


def test_the_card_says_that_the_model_was_in_low_bits(study: Study) -> None:
    words = {"layout": "compressed-tensors", "weights": "int4 in groups of 128, with zero points", "dtype": "bfloat16"}
    decoded = words | {"tensors": 168}
    study.build("gptq-int4", {"model.safetensors": 9}, source=SOURCE | {"decoded": decoded})
    files = study.published("gptq-int4")
    assert "The model was published in int4 in groups of 128, with zero points (compressed-tensors)" in files[
        "README.md"
    ].decode().replace("\n", " ")
    assert json.loads(files["quantmill.json"])["source"]["decoded"] == decoded


def test_a_disturbed_speed_is_not_a_hub_result(study: Study) -> None:
    study.row("gptq-int4")["interference"] = ["other programs took 40% of the processors' time"]
    study.write()
    card = study.published("gptq-int4")["README.md"]
    assert "281), disturbed |" in card.decode()
    assert "- `gptq-int4`: other programs took 40% of the processors' time" in card.decode()
    assert {each["metric_type"] for each in study.head(card)["results"]} == QUALITIES


def test_a_row_without_a_speed_says_why(study: Study) -> None:
    row = study.row("gptq-int4")
    lost = ("device", "device_details", "latency_summary", "other_modes", "versions", "threads", "mode", "compute_type")
    for name in (*lost, "tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "peak_memory_bytes"):
        row[name] = None
    row["interference"] = row["protocol"]["latency"] = None
    row["missing"]["tokens_per_second"] = "transformers unpacks the weights | <b>: not the format's speed"
    study.write()
    card = study.published("gptq-int4")["README.md"]
    assert "- `gptq-int4`: transformers unpacks the weights \\| &lt;b>: not the format's speed" in card.decode()
    assert "Measured perplexity by gptq-2048" in card.decode()
    assert {each["metric_type"] for each in study.head(card)["results"]} == QUALITIES


def test_each_engine_that_was_measured_has_its_command(study: Study) -> None:
    options = {"max_num_seqs": 64, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    options["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "4", "A": "b c"}
    versions = {"vllm": "0.32.0", "arguments": "--model=gptq-int4"}
    study.add_row("gptq-int4", run="served", engine="vllm-serve", options=options, versions=versions)
    study.add_row("gptq-int4", run="theirs", engine="tgi", options={"url": "http://h:1"}, versions={"tgi": "3.1"})
    study.write()
    card = study.published("gptq-int4")["README.md"].decode()
    python = card.partition("```python\n")[2].partition("```")[0]
    subprocess.run([study.python, "-c", COMPILE], input=python.encode(), check=True)
    assert 'GPTQModel.load("acme/demo", device="cpu")' in python
    assert "gptqmodel 7.6.0, kernel TorchFusedLinear:" in card  # the library might choose another
    shell = (
        card.partition("`gptq-int4@served`, as measured in vllm 0.32.0")[2].partition("```sh\n")[2].partition("```")[0]
    )
    assert "hf download acme/demo --local-dir gptq-int4\n" in shell
    assert "python3 -P -m vllm.entrypoints.openai.api_server --model=gptq-int4 " in shell
    assert "--max-num-seqs 64" in shell
    assert " VLLM_CPU_KVCACHE_SPACE=4 'A=b c' python3 -P -m " in shell  # those of the run, not Quantmill's
    assert "--max-model-len 514" in shell  # from the artifact's config.json
    assert "--speculative-config '{" in shell  # quoted for the shell
    assert "Measured in tgi. Its own manual says" in card


def test_options_of_a_library_are_its_arguments(study: Study) -> None:
    study.add_row(
        "fp16", run="bf16", options={"dtype": "bfloat16", "attn_implementation": "eager"}, compute_type="bfloat16"
    )
    options = {"max_num_seqs": 8, "environment": {"VLLM_CPU_INT4_W4A8": "0", "A": "b c"}}
    study.add_row("fp16", run="vllm", engine="vllm", options=options, versions={"vllm": "0.32.0"})
    study.write()
    card = study.published("fp16")["README.md"].decode()
    parts = [part.partition("```")[0] for part in card.split("```python\n")[1:]]
    for part in parts:
        subprocess.run([study.python, "-c", COMPILE], input=part.encode(), check=True)
    assert len(parts) == 3
    assert 'from_pretrained("acme/demo", dtype="float32").to("cpu")' in parts[0]
    assert 'from_pretrained("acme/demo", dtype="bfloat16", attn_implementation=\'eager\').to("cpu")' in parts[1]
    assert 'LLM("acme/demo", enable_prefix_caching=False, seed=0' in parts[2]  # as Quantmill measured it
    assert "max_model_len=514, max_num_seqs=8)" in parts[2]
    assert "Measured with `VLLM_CPU_INT4_W4A8=0 A='b c'` in the environment.\n\n```python" in card


def test_gguf_files_of_a_model_are_one_repository(study: Study) -> None:
    for name in ("gguf-q4_k_m", "gguf-q8_0"):
        options = {"n_batch": 256, "type_k": "q8_0"} if name == "gguf-q8_0" else {}
        study.add_row("gptq-int4", format=name, engine="llama_cpp", options=options, versions={"llama.cpp": "0.3.34"})
        study.build(name, {"model.gguf": 1000}, like="gptq-int4")
    served = {"llama.cpp": "0.3.34", "arguments": "--model gguf-q8_0/model.gguf --threads 3"}
    study.add_row("gptq-int4", format="gguf-q8_0", run="served", engine="llama-server", options={}, versions=served)
    study.write()
    names = ("gguf-q4_k_m", "gguf-q8_0")
    files = study.published(*names, layout="gguf")
    weights = {name for name in files if name.endswith(".gguf")}
    assert weights == {"demo-Q4_K_M.gguf", "demo-Q8_0.gguf"}
    assert "config.json" not in files  # the file holds it
    card = files["README.md"].decode()
    assert 'filename="demo-Q4_K_M.gguf", n_gpu_layers=0)' in card
    assert 'filename="demo-Q8_0.gguf", n_gpu_layers=0, n_batch=256)' in card
    assert 'Measured with the options `{"type_k": "q8_0"}`, in the engine\'s words.' in card
    assert "hf download acme/demo demo-Q8_0.gguf --local-dir gguf-q8_0" in card
    assert "llama-server --model gguf-q8_0/demo-Q8_0.gguf" in card
    assert "--threads 3" in card
    assert study.head(files["README.md"])["head"]["library_name"] == "gguf"
    assert json.loads(files["quantmill.json"])["artifacts"].keys() == set(names)
    assert {row["format"] for row in json.loads(files["results.json"])["rows"]} == set(names)
    result = study.push("gguf-q8_0", layout="gguf")  # another study, without the other file
    assert result.returncode == 1
    assert "holds 'gguf-q4_k_m', which this study does not publish; add it to publish.formats" in result.stderr


def test_compiled_libraries_are_not_uploaded(study: Study) -> None:
    study.build("gptq-int4", {"model.safetensors": 9, "model_lib.so": 9})
    files = study.published("gptq-int4")
    assert "model_lib.so" not in files
    assert "model_lib.so" not in json.loads(files["quantmill.json"])["files"]


def test_a_published_study_is_complete(study: Study) -> None:
    """The reference is a variant, and the tasks are files of the author's."""
    config = study.results["config"]
    config |= {"reference": "ct2-mine", "variants": {"ct2-mine": {"format": "ct2-int8", "parameter": 1}}}
    config["tasks"] = {"include": "mine", "names": ["quiz"], "chat_template": False, "metrics": {}}
    study.write()
    found = yaml.safe_load(study.published("gptq-int4")["study.yaml"])
    assert found["formats"] == ["ct2-mine", "gptq-int4"]
    assert found["variants"].keys() == {found["reference"]}
    assert "tasks" not in found
    del config["tasks"]["include"]
    study.write()
    assert yaml.safe_load(study.published("gptq-int4")["study.yaml"])["tasks"] == config["tasks"]
