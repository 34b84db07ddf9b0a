#!/usr/bin/env python3
"""A server that speaks OpenAI's and llama-server's API, whose times and tokens are known, with faults to plant.

    python tests/helpers/fake_server.py [--port 0] [--fault NAME ...] [--slots 16] [--times a b c d]

It prints its port. GET /truth tells when each request came and when its tokens were due and were written, by the clock
that `time.perf_counter` reads. Standard library alone, but for the exact timers of
scripts/quantmill/client/event_loop.py.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fake_answer import Answer
from fake_model import BOS, Model, tokenize
from timeline import Engine, Job

from quantmill.client.event_loop import new_event_loop

KEPT = 8  # tokens of a prompt that is cut on the left
FAULTS = (
    *("short", "long", "eos", "cut", "cut_quietly", "error", "chunks", "one_chunk", "split", "cumulative", "pings"),
    *("usage_lies", "no_usage", "prefix_cache", "prefix_cache_told", "answer_cache", "bos", "left_cut"),
    *("other_model", "batch", "speculation", "lossy", "acceptance", "rejects", "serial", "sampling", "ties"),
)


class Server:
    """Model, engine and faults; any number of sessions."""

    def __init__(self, engine: Engine, faults: tuple[str, ...] = ()) -> None:
        unknown = set(faults) - set(FAULTS)
        if unknown:
            raise ValueError(f"unknown faults: {unknown}")
        self.engine, self.faults = engine, set(faults)
        self.model = Model(seed=2 if "other_model" in faults else 1)
        self.seen: list[list[int]] = []
        self.random = random.Random(7)
        self.requests = self.generated = self.prompted = self.cached = 0
        if "serial" in faults:
            engine.slots = 1
        engine.speculate = bool({"speculation", "lossy", "acceptance"} & self.faults)

    def counters(self) -> dict[str, int | None]:
        """Return the reply of /metrics."""
        accepted = self.engine.accepted * (2 if "acceptance" in self.faults else 1)
        cached = None if {"prefix_cache", "answer_cache"} & self.faults else self.cached
        return {
            "prompt_tokens": self.prompted,
            "generated_tokens": self.generated,
            "cached_tokens": cached,
            "drafted": self.engine.drafted,
            "accepted": accepted,
        }

    def tokens(self, prompt: list[int], n: int, alone: Callable[[], bool]) -> "Tokens":
        """Return the ids that are written after a prompt."""
        return Tokens(self, prompt, n, alone)

    def prompt_logprobs(self, ids: list[int]) -> list[float | None]:
        """Of each token of a text; nothing precedes the first."""
        return [None, *(row[token] for row, token in zip(self.model.rows(ids), ids[1:], strict=True))]


class Tokens:
    """The model's tokens one by one, with what is wrong with them."""

    def __init__(self, server: Server, prompt: list[int], n: int, alone: Callable[[], bool]) -> None:
        self.server, self.alone, self.written = server, alone, 0
        self.state = server.model.state(prompt)

    def next(self) -> int:
        """Return the next one."""
        faults, model, rank = self.server.faults, self.server.model, 0
        if (
            ("batch" in faults and not self.alone() and self.written == 3)
            or ("lossy" in faults and self.written % 7 == 6)
            or ("sampling" in faults and self.server.random.random() < 0.3)
        ):
            rank = 1
        if "ties" in faults:
            first, second = (model.logits(self.state)[model.choose(self.state, each)] for each in (0, 1))
            rank = int(first - second < 0.05)
        token = model.choose(self.state, rank)
        self.state = model.state([token], self.state)
        self.written += 1
        return token


class Session:
    """One connection: bytes in, bytes out."""

    def __init__(self, server: Server, write: Callable[[bytes], None], close: Callable[[], None]) -> None:
        self.server, self.write, self.close, self.data = server, write, close, b""

    def feed(self, data: bytes) -> None:
        """Bytes of a request have come."""
        self.data += data
        head, _, rest = self.data.partition(b"\r\n\r\n")
        if len(head) == len(self.data):
            return
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields.get(b"content-length", 0))
        if len(rest) < size:
            return
        self.data = rest[size:]
        if method == "GET":
            jobs = self.server.engine.jobs
            truth = [{"arrival": job.arrival, "due": job.due, "written": job.written} for job in jobs]
            pages = {"/health": {}, "/metrics": self.server.counters(), "/truth": truth}
            self.whole(200 if path in pages else 404, pages.get(path, {"error": "no such path"}))
            return
        self._answer(path, json.loads(rest[:size]))

    def whole(self, status: int, content: Any) -> None:
        """Write an answer that is not a stream."""
        body = json.dumps(content, ensure_ascii=False).encode()
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)

    def _answer(self, path: str, asked: dict[str, Any]) -> None:
        server, faults = self.server, self.server.faults
        server.requests += 1
        if "rejects" in faults and server.requests % 3 == 0:
            self.whole(429 if server.requests % 2 else 503, {"error": {"message": "too many requests"}})
            return
        sent = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
        sent = tokenize(sent) if isinstance(sent, str) else sent
        n = asked.get("max_tokens", asked.get("n_predict"))
        prompt = [BOS, *sent] if "bos" in faults else sent[-KEPT:] if "left_cut" in faults else sent
        if "prompt_logprobs" in asked:
            self.whole(200, {"prompt_logprobs": server.prompt_logprobs(prompt)})
            return
        answer = Answer(self, path, asked, sent, prompt)
        new = {"short": n - 1, "long": n + 1, "eos": n // 2}
        total = next((new[name] for name in new if name in faults), n)
        job = Job(len(prompt), total, answer.step)
        if {"prefix_cache", "prefix_cache_told"} & faults:
            job.cached = max((_common(prompt, other) for other in server.seen), default=0)
        server.cached += job.cached
        known = prompt in server.seen
        server.seen.append(prompt)
        server.prompted += len(prompt)
        answer.begin(job, total)
        if "answer_cache" in faults and known:
            job.arrival = server.engine.clock.time()
            server.engine.clock.call_at(job.arrival + 0.001, answer.step, total, True)
        else:
            server.engine.submit(job)


def _common(a: list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Protocol(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server

    def connection_made(self, transport: Any) -> None:
        self.session = Session(self.server, transport.write, transport.close)

    def data_received(self, data: bytes) -> None:
        self.session.feed(data)


async def _serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    names = dict(zip("abcd", options.times, strict=True))
    server = Server(Engine(loop, slots=options.slots, **names), tuple(options.fault))
    listener = await loop.create_server(lambda: _Protocol(server), "127.0.0.1", options.port)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", nargs="*", default=[], choices=FAULTS)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--times", type=float, nargs=4, default=[0.02, 0.0001, 0.004, 0.0005], metavar=tuple("abcd"))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
