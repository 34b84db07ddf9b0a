"""The fake server's answers, event by event, and their faults."""

import json
from typing import Any

from fake_model import text
from timeline import Job

CHUNK = 4  # tokens of a chunk, where the fault is `chunks`


class Answer:
    """One streamed answer (or whole one) in a dialect."""

    def __init__(self, session: Any, path: str, asked: dict[str, Any], sent: list[int], prompt: list[int]) -> None:
        self.session, self.path, self.asked, self.sent, self.prompt = session, path, asked, sent, prompt
        self.server, self.faults = session.server, session.server.faults
        self.held: list[int] = []
        self.all: list[int] = []
        self.begun = self.broken = False

    def begin(self, job: Job, total: int) -> None:
        """Prepare what each step needs."""
        self.job, self.total = job, total
        self.tokens = self.server.tokens(self.prompt, total, lambda: self.server.engine.running <= 1)

    def step(self, tokens: int, last: bool) -> None:
        """Write the tokens that are due."""
        if self.broken:
            return
        new = [self.tokens.next() for _ in range(tokens)]
        self.held += new
        self.all += new
        self.server.generated += tokens
        self.job.written += [self.server.engine.clock.time()] * tokens
        if not self.asked.get("stream"):
            if last:
                self.session.whole(200, self._content(self.all, text(self.all), True))
            return
        if not self.begun:
            self._head()
        if {"cut", "cut_quietly", "error"} & self.faults and len(self.all) >= self.total // 2:
            self._break()
            return
        size = CHUNK if "chunks" in self.faults else self.total if "one_chunk" in self.faults else 1
        if len(self.held) >= size or last:
            if "cumulative" in self.faults:
                self._event(self._content([], text(self.all), last))
            else:
                self._event(self._content(self.held, text(self.held), last))
            self.held = []
        if last:
            self._end()

    def _head(self) -> None:
        self.begun = True
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.session.write(head.encode())
        if "pings" in self.faults:
            self._chunk(b": ping\n\n")
            self._event(self._content([], "", False))

    def _break(self) -> None:
        self.broken = True
        if "error" in self.faults:
            self._event({"error": {"message": "CUDA error: an illegal memory access", "type": "InternalServerError"}})
        if "cut" in self.faults:
            self.session.close()
        else:
            self.session.write(b"0\r\n\r\n")

    def _end(self) -> None:
        usage = self._usage()
        if not self._native():
            if usage and self.path != "/completion":
                self._event({"model": "fake", "choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
        self.session.write(b"0\r\n\r\n")

    def _native(self) -> bool:
        return self.path == "/completion"

    def _usage(self) -> dict[str, Any] | None:
        if "no_usage" in self.faults:
            return None
        read = len(self.prompt)
        wrote = round(len(self.all) * 1.1) if "usage_lies" in self.faults else len(self.all)
        usage: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
        if "prefix_cache_told" in self.faults:
            usage["prompt_tokens_details"] = {"cached_tokens": self.job.cached}
        return usage

    def _content(self, ids: list[int], words: str, last: bool) -> dict[str, Any]:
        finish = None if not last else "stop" if "eos" in self.faults else "length"
        if self._native():
            content = {"content": words, "tokens": ids, "stop": last, "tokens_predicted": len(self.all)}
            native = {"length": "limit", "stop": "eos"}.get(finish or "")
            more = {"stop_type": native, "tokens_evaluated": len(self.prompt), "model": "fake"}
            return content | (more if last else {})
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "text": words}
        if self.asked.get("return_token_ids") and "cumulative" not in self.faults:
            choice["token_ids"] = ids
            if len(self.all) == len(ids):
                choice["prompt_token_ids"] = self.prompt
        content = {"id": "cmpl-0", "object": "text_completion", "model": "fake", "choices": [choice]}
        return content | ({} if self.asked.get("stream") else {"usage": self._usage()})

    def _event(self, content: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        framed = b"%x\r\n%s\r\n" % (len(data), data)
        if "split" not in self.faults:
            self.session.write(framed)
            return
        inside = next((place for place, byte in enumerate(framed) if 0x80 <= byte < 0xC0), len(framed) // 2)
        for part in (framed[:1], framed[1:inside], framed[inside:-1], framed[-1:]):
            self.session.write(part)
