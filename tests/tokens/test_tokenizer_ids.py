"""Ids are those of tokenizer.json, whatever class transformers makes of a model's files; what differs is recorded."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

OWN = """
import json, sys, tokenizers
for folder in sys.argv[2:]:
    own = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    own.no_truncation()
    print(json.dumps(own.encode(open(sys.argv[1], encoding="utf-8").read()).ids))
"""
TEXT = "The first line, and more words.\n\nShe said: 'don't',  twice (2,000 times).\n" * 20
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
ADDED = {
    "content": " line",
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
LETTERS = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Sequence", "pretokenizers": [LETTERS, {**BYTE_LEVEL, "add_prefix_space": False}]}
OTHER = "makes"  # in the note of ids that differ
# tokenizer.json's changes, tokenizer_config.json's (None: no such file), the note's words
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str | None]] = {
    "as it is": ({}, {}, None),
    "no tokenizer_config.json": ({}, None, None),
    "Llama's class over byte level": ({}, {"tokenizer_class": "LlamaTokenizerFast"}, OTHER),
    "GPT-2's class over another split": ({"pre_tokenizer": DIGITS}, {"tokenizer_class": "GPT2TokenizerFast"}, OTHER),
    "Qwen's class over a normalizer": (
        *({"normalizer": {"type": "Lowercase"}}, {"tokenizer_class": "Qwen2Tokenizer"}, OTHER),
    ),
    "a token that the config adds": ({}, {"added_tokens_decoder": {"2047": ADDED}}, OTHER),
    "a special token that the config adds": ({}, {"additional_special_tokens": ["She said"]}, OTHER),
    "a first token that the config wants": ({"post_processor": BYTE_LEVEL}, {"add_bos_token": True}, "adds none"),
    "no first token, says the config": ({}, {"add_bos_token": False}, "adds one"),
    "a last token that the config wants": ({}, {"add_eos_token": True}, "adds none"),
    "truncation": (
        *({"truncation": {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}, {}, None),
    ),
}


def write(folder: Path, changed: dict[str, Any], config: dict[str, Any] | None) -> Path:
    folder.mkdir()
    content = {name: json.loads((REPO / f"demo/{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config")}
    (folder / "tokenizer.json").write_text(json.dumps(content["tokenizer"] | changed))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(content["tokenizer_config"] | config))
    shutil.copy(REPO / "demo/config.json", folder)
    (folder / "quantmill.json").write_text('{"source": {}}')
    return folder


def tokenize(torch_python: Path, folder: Path, models: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the output, end and file of tokens.tokenize_texts for each model."""
    (folder / "text.txt").write_text(TEXT)
    commands = [[*map(str, (each, folder / "text.txt", each / "out.json")), "--as", "evaluation"] for each in models]
    command = [*map(str, (torch_python, REPO / "tests/helpers/in_one_process.py", "tokens.tokenize_texts"))]
    result = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = {}
    for model, line in zip(models, result.stdout.splitlines(), strict=True):
        out = model / "out.json"
        found[model.name] = json.loads(line) | {"written": json.loads(out.read_text()) if out.exists() else None}
    return found


def own_ids(torch_python: Path, text: Path, *folders: Path) -> list[list[int]]:
    """Return the ids of the library `tokenizers` for a text, by each folder's tokenizer.json alone."""
    command = [*map(str, (torch_python, "-c", OWN, text, *folders))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torch_python: Path) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ids")
    models = [write(folder / name, changed, config) for name, (changed, config, _) in DIFFERENT.items()]
    found = tokenize(torch_python, folder, models)
    for model, ids in zip(models, own_ids(torch_python, folder / "text.txt", *models), strict=True):
        found[model.name]["own"] = ids
    return found


@pytest.mark.parametrize("name", DIFFERENT)
def test_ids_follow_tokenizer_json_and_differences_are_recorded(outcomes: dict[str, Any], name: str) -> None:
    found, said = outcomes[name], DIFFERENT[name][2]
    assert found["end"] is None
    assert found["written"]["ids"] == found["own"]
    differs = found["written"]["tokenizer_differs"]
    assert (said or "") in (differs or "")
    assert (differs is None) is (said is None)
    assert ("note: " in found["printed"]) is (said is not None)


def test_a_text_begins_with_its_bos(outcomes: dict[str, Any]) -> None:
    for name, (changed, _, _) in DIFFERENT.items():
        written = outcomes[name]["written"]
        assert written["bos_id"] == (None if "post_processor" in changed else 0), name
        assert written["prefix_id"] == 0, name


def test_documents_have_no_special_tokens(outcomes: dict[str, Any]) -> None:
    assert outcomes["as it is"]["written"]["documents"][0]["ids"] == outcomes["as it is"]["own"][1:]


def test_the_demo_under_llamas_class_keeps_its_tokens(outcomes: dict[str, Any]) -> None:
    """Check a case where transformers drops the spaces: a text had 6,415 ids for 5,156, and a perplexity of 4,880."""
    mine, theirs = (outcomes[name]["written"] for name in ("as it is", "Llama's class over byte level"))
    assert theirs["ids"] == mine["ids"]
    assert f" tokens of a text, tokenizer.json {len(mine['ids']):,}; " in theirs["tokenizer_differs"]
    assert "(LlamaTokenizer)" in theirs["tokenizer_differs"]


def test_other_tokenizer_files_are_proved_or_refused(tmp_path: Path, torch_python: Path) -> None:
    """vocab.json and merges.txt are read as GPT-2 reads them; nothing here reads tokenizer.model."""
    models = []
    for name, kind in (("gpt2", "GPT2Tokenizer"), ("llama", "LlamaTokenizer"), ("sentencepiece", "LlamaTokenizer")):
        folder = write(tmp_path / name, {}, {"tokenizer_class": kind})
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "tokenizer.json").unlink()
        if name == "sentencepiece":
            (folder / "tokenizer.model").write_bytes(b"x")
        else:
            (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
            merges = (each if isinstance(each, str) else " ".join(each) for each in model["merges"])
            (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        models.append(folder)
    found = tokenize(torch_python, tmp_path, models)
    own = own_ids(torch_python, tmp_path / "text.txt", REPO / "demo")[0][1:]
    assert found["gpt2"]["written"]["ids"][-len(own) :] == own
    for name, said in (("llama", "holds no tokenizer.json, and "), ("sentencepiece", "holds tokenizer.model and no")):
        assert found[name]["written"] is None
        assert said in found[name]["end"]
        assert "\n" not in found[name]["end"]
