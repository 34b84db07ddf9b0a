"""The engine that is MLC-LLM itself, with a stand-in for its package: what it is asked, and what becomes of it.

The stand-in has the names and signatures of MLC-LLM's synchronous engine; no model runs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quantmill import engines
from quantmill.common.program import UserError
from quantmill.latency.decoding import time_tokens


class StandIn:
    """An engine whose tokens count up from the prompt's last; the first step only reads the prompt."""

    made: list["StandIn"]

    def __init__(self, model: str, device: str, **options: Any) -> None:
        if device == "cuda":
            raise ValueError("Cannot find CUDA device")
        self.model, self.device, self.options = model, device, options
        self.requests: list[SimpleNamespace] = []
        self.resets = 0
        self.made.append(self)

    def create_request(self, name: str, inputs: Any, config: Any) -> SimpleNamespace:
        return SimpleNamespace(name=name, ids=inputs.token_ids, config=config, step=0)

    def add_request(self, request: SimpleNamespace) -> None:
        self.requests.append(request)

    def step(self) -> None:
        request = self.requests[-1]
        request.step += 1
        new = [] if request.step == 1 else [request.ids[-1] + request.step - 1]
        stream = SimpleNamespace(delta_token_ids=new, finish_reason=None)
        self.options["request_stream_callback"]([SimpleNamespace(unpack=lambda: (request.name, [stream]))])

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., engines.Engine]]:
    record = {"protocol.debug_protocol": ["DebugConfig"], "protocol.generation_config": ["GenerationConfig"]}
    record |= {"serve.config": ["EngineConfig"]}
    names = ("", "protocol", "serve", "serve.sync_engine", *record)
    for name in names:
        module = ModuleType(".".join(filter(None, ("mlc_llm", name))))
        for kind in record.get(name, ()):
            setattr(module, kind, SimpleNamespace)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["mlc_llm.serve"].data = SimpleNamespace(TokenData=lambda ids: SimpleNamespace(token_ids=ids))
    sys.modules["mlc_llm.serve.sync_engine"].SyncMLCEngine = StandIn
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    config = {"eos_token_id": [2, 999], "vocab_size": 500, "quantization": "q4f16_1"}
    (tmp_path / "mlc-chat-config.json").write_text(json.dumps(config))
    yield lambda device="cpu", **options: engines.load("mlc_llm", tmp_path, device, 1, **options)
    sys.modules.pop("quantmill.engines.mlc_llm", None)


def test_mlc_llm_is_given_the_ids_and_nothing_else(load: Callable[..., engines.Engine], tmp_path: Path) -> None:
    engine = load()
    for prompt in ([5, 6, 7], [5, 6, 7]):
        timing = time_tokens(engine, [prompt], 4)
        assert timing.tokens == [8, 9, 10, 11]
        assert timing.seconds == sorted(timing.seconds)
    (inner,) = StandIn.made
    assert [request.ids for request in inner.requests] == [[5, 6, 7]] * 2
    assert len({request.name for request in inner.requests}) == 2
    assert inner.resets == 2
    config = inner.requests[0].config
    assert (config.temperature, config.max_tokens, config.debug_config.ignore_eos) == (0.0, 4, True)
    assert config.logit_bias == {2: -100.0}  # 999 is beyond the vocabulary
    assert inner.options["engine_config"].prefix_cache_mode == "disable"
    assert (inner.options["model_lib"], inner.options["mode"]) == (None, "interactive")  # it compiles


def test_mlc_llm_s_own_library_is_taken(load: Callable[..., engines.Engine], tmp_path: Path) -> None:
    (tmp_path / "mlc_llm.so").touch()
    load(mode="server")
    assert StandIn.made[0].options["model_lib"] == str(tmp_path / "mlc_llm.so")
    assert StandIn.made[0].options["mode"] == "server"


def test_what_mlc_llm_cannot_tell_is_empty(load: Callable[..., engines.Engine]) -> None:
    engine = load()
    assert not engine.capabilities
    assert engine.weight_bytes() is None
    assert engine.compute_type == "float16"
    assert engine.versions() == {"mlc_llm": "unknown"}


def test_what_mlc_llm_raises_is_one_line(load: Callable[..., engines.Engine], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MLC-LLM cannot load it \(Cannot find CUDA device\)"):
        load("cuda")
