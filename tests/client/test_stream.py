"""Responses are read the same however they are cut into chunks and packets, and nothing in them raises."""

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmill.client import stream
from quantmill.client.connection import Connection, Exchange
from quantmill.client.dialects import DIALECTS
from quantmill.client.stream import MAX_ERROR

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
COMPLETIONS = DIALECTS["completions"]


def exchange(data: bytes, cuts: list[int] | None = None, failure: str | None = None) -> Exchange:
    """Return a response that arrived in pieces, one per second."""
    ends = [*sorted(cuts or []), len(data)]
    stamps = array("d", range(1, len(ends) + 1))
    return Exchange(0, 0.5, 0.5, bytearray(data), stamps, array("Q", ends), float(len(ends)), failure)


def chunked(*chunks: bytes, trailer: bytes = b"") -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailer + b"\r\n"


def event(text: str = "", ids: list[int] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}, ensure_ascii=False).encode() + b"\n\n"


EVENTS = [
    b": ping\n\n",
    event(prompt_logprobs=None),
    event("é", [5], model="demo"),
    b"event: message\r\nid: 7\r\n" + event("日本", [6, 7]).strip() + b"\r\n\r\n",
    event("\n\n", [8]).replace(b'"index"', b'\ndata: "index"'),
    event("", [9], "length"),
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": null}}\n\n',
    b"data: [DONE]\n\n",
]


@given(st.data())
def test_cuts_do_not_change_a_stream(data: st.DataObject) -> None:
    content = b"".join(EVENTS)
    places = st.lists(st.integers(1, len(content) - 1), max_size=12, unique=True)
    edges = [0, *sorted(data.draw(places, "chunks")), len(content)]
    body = chunked(*(content[a:b] for a, b in itertools.pairwise(edges)))
    cuts = data.draw(st.lists(st.integers(1, len(body) - 1), max_size=12, unique=True), "packets")
    reply = stream.read(exchange(body, cuts), COMPLETIONS)
    assert (reply.ok, reply.finish, reply.model, reply.error) == (True, "length", "demo", None)
    assert (reply.ids, reply.text) == ((5, 6, 7, 8, 9), "é日本\n\n")
    assert reply.usage == (3, 5, None)
    assert (reply.oddities["pings"], reply.oddities["empty"]) == (1, 1)
    assert [each.tokens for each in reply.events] == [1, 2, 1, 1]
    # each event's time is that of the packet that brought its last byte
    at = 0
    for piece, seen in zip(EVENTS[2:6], reply.events, strict=True):
        at = content.index(piece, at) + len(piece)
        chunk = sum(edge < at for edge in edges) - 1
        header = sum(len(b"%x\r\n" % (b - a)) for a, b in itertools.pairwise(edges) if a <= edges[chunk])
        raw = len(HEAD) + at + header + 2 * chunk
        assert seen.time == 1 + sum(cut < raw for cut in cuts)


@given(st.data())
def test_cuts_do_not_hide_the_end_of_a_response(data: st.DataObject) -> None:
    """It ends with the last byte, and not before: also where the content looks like a last chunk."""
    body = data.draw(
        st.sampled_from(
            [
                chunked(b"data: 10\r\n\r\n", b"0\r\n\r\n"),
                chunked(b"x" * 300, trailer=b"Checksum: 7\r\nMore: 1\r\n"),
                HEAD.replace(b"chunked", b"gzip, Chunked") + b"5;name=value\r\nhello\r\n0\r\n\r\n",
                b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"hello"),
                PLAIN.replace(b"\r\n\r\n", b"\r\ncontent-LENGTH: 7\r\n\r\n") + b"1234567",
                b"HTTP/1.1 204 No Content\r\n\r\n",
            ]
        )
    )
    cuts = data.draw(st.lists(st.integers(1, len(body) - 1), max_size=8, unique=True))
    connection = Connection(lambda: 0.0)
    ended = []
    connection._exchange = made = Exchange(0, 0.0)
    connection._end = ended.append
    edges = [0, *sorted(cuts), len(body)]
    for a, b in itertools.pairwise(edges):
        assert not ended
        connection.get_buffer(-1)[: b - a] = body[a:b]
        connection.buffer_updated(b - a)
    assert ended == [None]
    assert bytes(made.data) == body


@given(st.binary(max_size=200), st.sampled_from([HEAD, PLAIN, b"", HEAD + b"5\r\ndata:\r\n", PLAIN + b"data: "]))
def test_nothing_that_a_server_sends_raises(noise: bytes, head: bytes) -> None:
    for dialect in DIALECTS.values():
        reply = stream.read(exchange(head + noise), dialect)
        assert not reply.ok or reply.text is not None
        stream.timeline(reply)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"error": "busy"}\n\n', "busy"),
        (b'data: {"object": "error", "message": "too long", "code": 400}\n\n', "too long"),
        (b'event: error\ndata: {"detail": "gone"}\n\n', "gone"),
        (b'error: {"code": 500, "message": "slot lost"}\n\n', "slot lost"),
        (b"data: {broken\n\n", "an event that cannot be read: {broken"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "an event that cannot be read"),
        (b'data: {"choices": [{"text": "a", "token_ids": ["b"]}]}\n\n', "an event that cannot be read"),
        (b'data: {"choices": [{"text": 7}]}\n\n', "an event that cannot be read"),
        (b'data: {"choices": {}}\n\ndata: [7]\n\n', "an event that cannot be read: [7]"),
    ],
)
def test_an_error_inside_of_a_stream_is_kept(content: bytes, error: str) -> None:
    reply = stream.read(exchange(chunked(content, b"data: [DONE]\n\n")), COMPLETIONS)
    assert not reply.ok
    assert reply.error.startswith(error)
    assert stream.timeline(reply).outcome == "failed"


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, "rejected"), (503, "rejected"), (500, "failed"), (401, "failed")]
)
def test_a_status_other_than_200_is_no_answer(status: int, outcome: str) -> None:
    body = b'{"error": {"message": "no key sk-123 here"}}'
    data = b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    reply = stream.read(exchange(data), COMPLETIONS, token="sk-123")
    assert (reply.status, reply.error) == (status, "no key *** here")
    assert stream.timeline(reply).outcome == outcome


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("form", ["%s", '{"error": {"message": "%s"}}'])
def test_a_cut_error_shows_no_part_of_a_token(status: int, form: str) -> None:
    for at in range(MAX_ERROR - 80, MAX_ERROR):
        body = (form % ("." * at + "sk-123456 and more")).encode()
        data = b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
        error = stream.read(exchange(data), COMPLETIONS, token="sk-123456").error
        assert len(error) <= MAX_ERROR
        assert "s" not in error.partition("....")[2].partition("and")[0]


def test_a_whole_answer_without_a_stream() -> None:
    choice = {"text": "ab", "token_ids": [1, 2], "finish_reason": "length", "prompt_token_ids": [9, 9]}
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}).encode()
    data = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    reply = stream.read(exchange(data, [20]), COMPLETIONS)
    assert (reply.ok, reply.ids, reply.prompt_ids, reply.finish) == (True, (1, 2), (9, 9), "length")
    assert [each.time for each in reply.events] == [2.0]
    cut = stream.read(exchange(data[:-9], failure="the connection was lost"), COMPLETIONS)
    assert not cut.ok


def test_a_stream_that_only_its_connection_ends() -> None:
    data = PLAIN + event("a", [1], "length") + b"data: [DONE]"
    assert stream.read(exchange(data), COMPLETIONS).ok
    assert not stream.read(exchange(data, failure="the connection was lost"), COMPLETIONS).ended


def test_llama_server_withholds_tokens_inside_a_character() -> None:
    """In its stream the count goes on, and the id never comes."""

    def part(text: str, token: int, so_far: int) -> bytes:
        content = {"content": text, "tokens": [token], "stop": False, "tokens_predicted": so_far}
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    end = {
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": "limit",
        "tokens_predicted": 4,
        "tokens_evaluated": 3,
    }
    end |= {"timings": {"cache_n": 0}, "model": "demo.gguf"}
    data = chunked(part("a", 5, 1), part("é", 7, 3), part("b", 8, 4), b"data: " + json.dumps(end).encode() + b"\n\n")
    reply = stream.read(exchange(data), DIALECTS["llama"])
    assert (reply.ok, reply.finish, reply.text, reply.tokens) == (True, "length", "aéb", 4)
    assert [each.tokens for each in reply.events] == [1, 2, 1]
    assert reply.ids is None  # one of them is not known
    assert reply.oddities["withheld"] == 1
    assert reply.usage == (3, 4, 0)


def test_llama_server_may_withhold_the_last_token() -> None:
    """Then its last event alone tells of it. An end of sequence is no token that was asked for."""

    def event(text: str, tokens: list[int], so_far: int, stop: str = "") -> bytes:
        content = {"content": text, "tokens": tokens, "stop": bool(stop), "tokens_predicted": so_far}
        content |= {"stop_type": stop, "tokens_evaluated": 3, "model": "demo.gguf"} if stop else {}
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    reply = stream.read(exchange(chunked(event("a", [5], 1), event("", [], 2, "limit"))), DIALECTS["llama"])
    assert [each.tokens for each in reply.events] == [1, 1]
    assert (reply.tokens, reply.ids, reply.oddities["withheld"]) == (2, None, 1)
    reply = stream.read(exchange(chunked(event("a", [5], 1), event("", [], 2, "eos"))), DIALECTS["llama"])
    assert (reply.tokens, reply.ids) == (1, (5,))


def test_repeated_ids_are_seen_by_their_counts() -> None:
    """SGLang's: text and ids of each event hold all before; a token inside a character adds no text."""

    def said(text: str, ids: list[int], finish: dict[str, Any] | None = None) -> bytes:
        meta = {"prompt_tokens": 3, "completion_tokens": len(ids), "finish_reason": finish, "cached_tokens": 0}
        return b"data: " + json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    for events, ids, text in (
        ([said("a", [5]), said("ab", [5, 9], {"type": "length"})], (5, 9), "ab"),
        ([said("a", [5]), said("a", [5, 9]), said("ac", [5, 9, 7], {"type": "length"})], (5, 9, 7), "ac"),
    ):
        reply = stream.read(exchange(chunked(*events, b"data: [DONE]\n\n")), DIALECTS["sglang"])
        assert (reply.ids, reply.text, reply.tokens, reply.finish, reply.ok) == (ids, text, len(ids), "length", True)


def test_a_json_object_a_line_is_an_event() -> None:
    """ollama's, cut inside of a line: what is not whole counts for nothing, and the end is missing."""
    lines = [json.dumps({"response": word, "done": False}).encode() + b"\n" for word in ("one", " two")]
    usage = {"done_reason": "length", "prompt_eval_count": 4, "eval_count": 2}
    last = json.dumps({"response": "", "done": True, **usage}).encode() + b"\n"
    head = PLAIN.replace(b"text/event-stream", b"application/x-ndjson")
    reply = stream.read(exchange(head + b"".join(lines) + last), DIALECTS["ollama"])
    assert ([each.text for each in reply.events], reply.finish, reply.ok) == (["one", " two"], "length", True)
    assert reply.usage == (4, 2, None)
    cut = stream.read(exchange(head + lines[0] + lines[1][:9], failure="lost"), DIALECTS["ollama"])
    assert (cut.text, cut.ended, cut.ok, cut.error) == ("one", False, False, None)
