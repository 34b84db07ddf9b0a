"""Ids that a config names and the vocabulary lacks: nothing is read by them, and nothing stumbles over them."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from quantmill.common import special_tokens
from quantmill.mlc import architecture, chat_config, source_config
from quantmill.quality import alignment


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, [1]),
        ([1, 9, 10, 99999, -1, True, "2", 2.0, None, [3]], [1, 9]),
        (None, []),
        (True, []),
        ("1", []),
        (-1, []),
        (10, []),
        ({}, []),
        (10**30, []),
    ],
)
def test_ids_of_a_vocabulary_of_ten(value: Any, expected: list[int]) -> None:
    assert special_tokens.select(value, 10) == expected
    assert special_tokens.select(value, None) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token_id": 1, "vocab_size": 10}, 1),
        ({"bos_token_id": 10, "vocab_size": 10}, 5),
        ({"bos_token_id": -1, "vocab_size": 10}, 5),
        ({"bos_token_id": True, "vocab_size": 10}, 5),
        ({"bos_token_id": "1", "vocab_size": 10}, 5),
        ({"bos_token_id": 1, "vocab_size": "x"}, 5),
        ({"text_config": {"bos_token_id": 2, "vocab_size": 10}}, 2),
        ({"bos_token_id": 12, "text_config": {"vocab_size": 10}}, 5),
        ({"bos_token_id": 1, "vocab_size": 10, "text_config": []}, 1),
        ({}, 5),
        (None, 5),
    ],
)
def test_an_engines_added_token_is_in_the_vocabulary(
    tmp_path: Path, config: dict[str, Any] | None, expected: int
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert alignment.added_token(tmp_path, [5, 6]) == expected


@pytest.mark.parametrize("value", [99999, -1, True, "x", [1, 99999, "x"], [], {}])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_an_mlc_artifact_with_any_ids_is_read(tmp_path: Path, key: str, value: Any) -> None:
    content = json.loads((REPO / "demo/config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    chat_config.write(tmp_path, tmp_path, source_config.read(content, tmp_path / "config.json"), "q4f16_1")
    served = architecture.of_artifact(tmp_path)
    assert set(served.stop_ids) <= {1, 2}
    written = json.loads((tmp_path / chat_config.NAME).read_text())
    assert type(written["bos_token_id"]) is type(written["pad_token_id"]) is int
    assert all(type(token) is int for token in written["conv_template"]["stop_token_ids"])
    written["eos_token_id"] = value
    (tmp_path / chat_config.NAME).write_text(json.dumps(written))
    assert architecture.of_artifact(tmp_path).stop_ids == special_tokens.select(value, 2048)
