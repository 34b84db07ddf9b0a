"""Run the example that the README leads to, with a small model and short texts from a hub on this machine."""

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import CHARACTERS, REPO, interpreter
from hub_server import Repository, lines_of, parquet_of, serve

from quantmill.plan.config import TEXTS

STUDY = "config/examples/seven-billion.yaml"
TOKEN = "hf_secretsecretsecret"


@pytest.mark.slow
def test_the_main_example_from_a_hub(
    checkout: Callable, call: Callable, tmp_path: Path, tools_python: Path, torch_python: Path
) -> None:
    """Build a gated model of .bin weights with its default texts; a second run needs no network."""
    root = checkout()
    ((name, model),) = yaml.safe_load((root / STUDY).read_text())["models"].items()
    source, (_, wikitext), (_, c4) = model["source"], TEXTS["evaluation"], TEXTS["calibration"]
    rows = [f"{line}\n" for line in (root / "config/evaluation.txt").read_text()[:CHARACTERS].splitlines()]
    short = {
        "latency": {"new_tokens": 8, "repeats": 1, "processes": 1, "prompt_tokens": []},
        "calibration": {"samples": 2, "sequence_length": 128},
        "interpreters": {env: str(interpreter(env)) for env in ("tools", "torch", "gptqmodel", "mlc")},
        "remove_intermediates": False,  # the second run looks for the source
    }
    (root / "short.yaml").write_text(json.dumps(short))
    snakemake = (REPO / ".venv/bin/snakemake", "--cores", "2", "--configfile", STUDY, "short.yaml", "--")
    with serve() as hub:
        hub.repositories[f"models/{source['hub']}"] = stored = Repository.of(
            REPO / "demo", revisions={"main", source["revision"]}, gated=True, token=TOKEN
        )
        weights = [file for file in sorted(stored.files) if file.endswith((".bin", ".safetensors"))]
        assert weights == [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
        hub.repositories[f"datasets/{wikitext['hub']}"] = Repository(
            {wikitext["file"]: parquet_of(rows, tmp_path / "t.parquet", tools_python)}, revisions={wikitext["revision"]}
        )
        lines = (root / "config/calibration.txt").read_text().splitlines()
        hub.repositories[f"datasets/{c4['hub']}"] = Repository(
            {c4["file"]: gzip.compress(lines_of(lines))}, revisions={c4["revision"]}
        )
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        result = call(*snakemake, "report", cwd=root, **environment)
        assert result.returncode == 1
        assert f"error: {source['hub']}: is gated; accept its terms" in result.stdout + result.stderr
        result = call(*snakemake, "report", cwd=root, HF_TOKEN=TOKEN, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        manifest = json.loads((root / f"artifacts/{name}/fp16/quantmill.json").read_text())["source"]
        found = (manifest["hub"], manifest["revision"], manifest["commit"])
        assert found == (source["hub"], source["revision"], source["revision"])
        assert (root / "artifacts/texts/evaluation/text.txt").read_text() == "\n\n".join(rows)
        measured = json.loads((root / "artifacts/report/results.json").read_text())["rows"]
        assert [row["format"] for row in measured] == yaml.safe_load((root / STUDY).read_text())["formats"]
        assert all(row["perplexity"] and row["tokens_per_second"] for row in measured)
        assert (root / "artifacts/report/index.html").is_file()
        asked = len(hub.log)
        (root / f"artifacts/{name}/source").rename(tmp_path / "source")
        result = call(*snakemake, f"artifacts/{name}/source", cwd=root, **environment | {"HF_HUB_OFFLINE": "1"})
        assert result.returncode == 0, result.stdout + result.stderr
        assert len(hub.log) == asked
    places = (root / "artifacts", root / ".snakemake", tmp_path)
    written = subprocess.run(["grep", "-rl", TOKEN, *places], capture_output=True, text=True, check=False)
    assert written.stdout == ""  # neither a log, a manifest, a command line nor the cache holds the token
    assert any((root / f"artifacts/{name}/source").iterdir())
