"""lm-evaluation-harness reads prompts by tokenizer.json, as every other text; a chat template ends within limits."""

import json
import shutil
import subprocess
from typing import Any

import pytest
from conftest import REPO, interpreter

PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import tokenizers
from quantmill.common import limited
from quantmill.common.program import UserError
from quantmill.tasks import adapter
adapter.RENDERING["seconds"] = 2
told = SimpleNamespace(facts={"capabilities": ["logits"]})
for folder in map(Path, sys.argv[2:]):
    def work():
        model = adapter.Adapter(folder, told)
        one = model.tok_encode(sys.argv[1])
        many = model.tok_batch_encode([sys.argv[1]])[0][0].tolist()
        chat = None
        if model.tokenizer.chat_template:
            chat = model.apply_chat_template([{"role": "user", "content": "x"}])
        ends = [model.prefix_token_id, model.eot_token_id]
        return {"one": one, "many": many, "text": model.tok_decode(one), "chat": chat, "ends": ends}
    try:
        found = limited.call(work)
    except UserError as error:
        found = {"error": str(error)}
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(sys.argv[1]).ids
    print(json.dumps(found | {"own": own}))
"""
TEXT = "The first line, and more words: don't (2,000)."
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CONFIGS: dict[str, dict[str, str] | None] = {
    "as it is": {},
    "no tokenizer_config.json": None,
    "Llama's class": {"tokenizer_class": "LlamaTokenizerFast"},
    "a token that the config adds": {"additional_special_tokens": ["first"]},
    "a template": {"chat_template": "{{ messages[0]['content'] }}!"},
    "a template without end": {"chat_template": LOOP},
    "a template of a large text": {"chat_template": "{{ messages[0]['content'] * 10**10 }}"},
    "a template of a long number": {"chat_template": "{{ (messages | length + 9) ** (10 ** 8) }}"},
    "a template that fails": {"chat_template": "{{ messages.x.y }}"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("task tokens")
    words = json.loads((REPO / "demo/tokenizer_config.json").read_text())
    for name, changed in CONFIGS.items():
        (folder / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(REPO / "demo" / file, folder / name)
        if changed is not None:
            (folder / name / "tokenizer_config.json").write_text(json.dumps(words | changed))
    command = [interpreter("lm-eval"), "-c", PROGRAM, TEXT, *(folder / name for name in CONFIGS)]
    environment = {"PYTHONPATH": str(REPO / "scripts"), "PATH": "/bin", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return dict(zip(CONFIGS, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", [name for name in CONFIGS if "template" not in name])
def test_task_prompts_follow_tokenizer_json(found: dict[str, dict[str, Any]], name: str) -> None:
    assert found[name]["one"] == found[name]["many"] == found[name]["own"]
    assert found[name]["text"] == TEXT
    assert found[name]["ends"] == [0, 1]


def test_a_chat_template_is_applied(found: dict[str, dict[str, Any]]) -> None:
    assert found["a template"]["chat"] == "x!"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a template without end", "ran out of the 2 s of processor time"),
        ("a template of a large text", "ran out of the 512 MB of memory"),
        ("a template of a long number", "ran out of the 2 s of processor time"),
        ("a template that fails", "its chat template fails ("),
    ],
)
def test_a_chat_template_without_end_is_one_line(found: dict[str, dict[str, Any]], name: str, said: str) -> None:
    assert said in found[name]["error"]
    assert name in found[name]["error"]
    assert "\n" not in found[name]["error"]
