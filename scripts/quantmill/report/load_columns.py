"""The table of columns of servers under load, as columns.py is that of one request at a time."""

from statistics import mean, median
from typing import Any

from quantmill.metrics.serving import Reads, reads
from quantmill.report import caveats
from quantmill.report.column import NOT_NEGATIVE, POSITIVE, SHARE, Column, device, limits, of_cell
from quantmill.report.rows import Row

LARGEST_RATE = "largest rate"
UNTOLD = "the server does not report it"
SEARCH = "of the search for the largest rate alone"
UNREAD = (
    "known of loads that keep a number of requests in flight (of a mixture of experts, one), if the engine "
    "reports its weights and its cache"
)


def of_load(name: str, text: str, kind: Any = "number", **more: Any) -> Column:
    """Describe a figure of one load."""
    more = {"why_missing": UNTOLD, "limits": NOT_NEGATIVE, "source": lambda load: load["figures"].get(name)} | more
    return Column(**{"name": name, "kind": kind, "text": text, "parts": ("load",)} | more)


def latency(name: str, what: str, percent: int, **more: Any) -> Column:
    """Describe a percentile over requests, in ms."""
    text = f"{percent}th percentile over requests of {what} (SERVING.md, Figures)."
    return of_load(f"{name}_p{percent}", text, unit="ms", better="lower", **more)


def bytes_read(measured: dict[str, Any], load: dict[str, Any], row: Row) -> Reads | None:
    """Return what decoding reads under a load that keeps a number of requests in flight; None for other loads, or if
    weights, cache, throughput, or the number of experts that a mixture reads for several users are not known."""
    weights, keys = measured["artifact"].get("weight_bytes_per_token"), measured.get("kv_bytes_per_token")
    figures = load["figures"]
    throughput = figures.get("output_tokens_per_second")
    # without speculation an event of several tokens is of several steps: the server was slow to send them
    step = 1 if figures.get("acceptance") is None else figures.get("tokens_per_event")
    # of a server elsewhere the row has no share: its device is not the one whose bandwidth is known
    if weights is None or keys is None or throughput is None or step is None:
        return None
    if load["slots"] is None or row["bandwidth_fraction"] is None:
        return None
    if measured.get("mixture") and load["slots"] > 1:  # the weights are counted with the experts of one token
        return None
    prompt, new = (mean(limits(measured["protocol"]["loads"][name])) for name in ("prompt_tokens", "new_tokens"))
    return reads(throughput, load["slots"], step, prompt + new / 2, weights, keys)


def bandwidth_fraction(measured: dict[str, Any], load: dict[str, Any], row: Row) -> float | None:
    """Return the share of `device_bandwidth`."""
    found = bytes_read(measured, load, row)
    return sum(found) / row["device_bandwidth"]["bytes_per_second"] if found and row["device_bandwidth"] else None


def decode_bound_by(measured: dict[str, Any], load: dict[str, Any], row: Row) -> str | None:
    """Return whether weights or KV cache are most of the bytes that decoding reads."""
    found = bytes_read(measured, load, row)
    return found and ("weights" if found.weights > found.keys else "cache")


TTFT = "the time from when a request was to be sent to its first token"
TPOT = "the time for each token after the first event"

# in the order of loads.csv
LOAD_COLUMNS = [
    of_cell("model", "Name of the model in the study's config.", lambda cell: cell["model"], shown=1),
    of_cell("format", "Name of the format.", lambda cell: cell["format"], shown=2),
    of_cell("run", "Name of the run: a server with its options.", lambda cell: cell["run"], shown=3),
    of_cell("engine", "The server, by its registered name.", lambda cell: cell["engine"]),
    Column(
        name="device",
        kind="string",
        text="Name of the processor or GPU that the server ran on.",
        parts=("measured",),
        source=device,
        why_missing=UNTOLD,
    ),
    Column(
        name="gpus",
        kind="integer",
        text="GPUs that the server ran on.",
        parts=("measured",),
        source=lambda measured: measured["gpus"],
        limits=POSITIVE,
        why_missing=UNTOLD,
    ),
    of_load(
        "load",
        f"The load: burst-N, concurrency-N, rate-R, or {LARGEST_RATE!r}, the outcome of the search for it.",
        "string",
        source=lambda load: load["load"],
        limits={},
        shown=4,
    ),
    of_load(
        "slots",
        "Requests that the load keeps in flight.",
        "integer",
        source=lambda load: load["slots"],
        why_missing="the load keeps no number of them",
    ),
    of_load(
        "rate",
        "Requests a second of the schedule; of the largest rate, the largest at which 99% of those that arrived met "
        "the limits of the config.",
        source=lambda load: load["rate"],
        why_missing="its requests have no rate",
        unit="1/s",
        better="higher",
        shown=5,
    ),
    of_load(
        "rate_ci_low",
        "The largest rate whose share is at least 99% by its 95% interval.",
        unit="1/s",
        why_missing=SEARCH,
    ),
    of_load(
        "rate_ci_high",
        "The smallest rate whose share is less than 99% by its 95% interval.",
        unit="1/s",
        why_missing=SEARCH,
    ),
    of_load("requests", "Requests of all starts of the server.", "integer"),
    *(of_load(name, f"Of these, {name}.", "integer") for name in ("failed", "rejected", "unfinished")),
    of_load(
        "output_tokens_per_second",
        "New tokens of all requests together that came within the window, divided by its length; of a burst, by the "
        "time to its last token.",
        unit="1/s",
        title="tokens/s of all",
        better="higher",
        shown=6,
    ),
    of_load("output_tokens_per_second_low", "Lower end of its 95% interval: bootstrap over starts.", unit="1/s"),
    of_load("output_tokens_per_second_high", "Upper end of the same interval.", unit="1/s"),
    of_load(
        "user_tokens_per_second",
        "1,000 over tpot_ms_p50: how fast a user sees tokens come.",
        source=lambda load: 1000 / load["figures"]["tpot_ms_p50"] if load["figures"].get("tpot_ms_p50") else None,
        unit="1/s",
        title="tokens/s of a user",
        better="higher",
        shown=7,
    ),
    of_load("requests_per_second", "Requests that were answered within the window, over its length.", unit="1/s"),
    latency("ttft_ms", TTFT, 50, title="TTFT", shown=8),
    latency("ttft_ms", TTFT, 90, title="TTFT p90", shown=9),
    latency("ttft_ms", TTFT, 99),
    latency("tpot_ms", TPOT, 50, title="TPOT", shown=10),
    latency("tpot_ms", TPOT, 90, title="TPOT p90", shown=11),
    latency("tpot_ms", TPOT, 99),
    latency("itl_ms_max", "the longest time between two events of a request", 99),
    latency("e2e_ms", "the time from when a request was to be sent to its end", 99),
    of_load(
        "makespan_s",
        "From the start of the load to its last end; the median of the starts.",
        unit="s",
        title="makespan",
        shown=12,
    ),
    of_load(
        "slo_attainment",
        "Share of the requests that arrived and met the config's limits for TTFT and TPOT.",
        limits=SHARE,
        better="higher",
        title="within limits",
        shown=13,
    ),
    of_load("preemptions", "How often the server put a request back into its queue."),
    of_load("cached_token_fraction", "Tokens of prompts that came out of a cache, of all.", limits=SHARE),
    of_load(
        "acceptance",
        "Drafted tokens that were accepted, of all that were drafted.",
        limits=SHARE,
        why_missing="nothing was drafted",
    ),
    of_load("tokens_per_event", "New tokens for each event that brought any."),
    of_load(
        "bandwidth_fraction",
        "Bytes that decoding reads, over what the device copies in that time: the weights once in each step for all "
        "requests in flight, and each one's keys and values. What is missing to 1 went to prompts, arithmetic and "
        "waiting.",
        source=bandwidth_fraction,
        parts=("measured", "load", "row"),
        limits=NOT_NEGATIVE,
        why_missing=UNREAD,
        title="of the bandwidth",
    ),
    of_load(
        "decode_bound_by",
        "Whether weights or KV cache dominate these bytes.",
        "string",
        source=decode_bound_by,
        parts=("measured", "load", "row"),
        limits={"enum": ["weights", "cache", None]},
        why_missing=UNREAD,
    ),
    of_load(
        "tokens_equal_solo",
        "Share of the answers that were compared whose tokens are those of the same prompt alone; where they are not, "
        "each token is within 0.05 nats of the likeliest, or the load is refused.",
        limits=SHARE,
        why_missing="the server returns no ids",
        title="same tokens",
        shown=14,
    ),
    Column(
        name="nll_shift",
        kind="number",
        text="How far the mean log-probability of a text's tokens is from that of the same text alone, where eight "
        "texts are scored together: the server's own noise floor.",
        parts=("measured",),
        source=lambda measured: measured["summary"].get("nll_shift"),
        unit="nat/token",
        why_missing=UNTOLD,
        better="lower",
    ),
    of_load(
        "joules_per_token",
        "Energy that the device took over the load, over its tokens.",
        unit="J",
        why_missing="the device does not report its energy",
    ),
    of_load("client_cpu_fraction", "Of a core, what the client took; the most of any start.", limits=NOT_NEGATIVE),
    of_load(
        "schedule_lag_ms_p99",
        "How late the client took requests up, 99th percentile; the most of any start.",
        unit="ms",
    ),
    Column(
        name="startup_s",
        kind="number",
        text="From the server's start to its first answer; the median of the starts.",
        parts=("measured",),
        source=lambda measured: None if None in (found := measured["summary"]["startup_s"]) else float(median(found)),
        unit="s",
        why_missing=UNTOLD,
        better="lower",
    ),
    of_load(
        "refused",
        "Why the figures do not count; null if they do.",
        "string",
        source=lambda load: "; ".join(each["message"] for each in load["findings"] if each["refuses"]) or None,
        limits={},
        why_missing="the figures count",
    ),
    of_load(
        "notes",
        "What was noticed and changes no figure. In loads.csv joined by '; ', or none.",
        "array",
        parts=("measured", "load"),
        source=lambda measured, load: [
            *caveats.products_warnings(measured["versions"]),
            *(each["message"] for each in load["findings"] if not each["refuses"]),
        ],
        limits={},
    ),
    of_load(
        "interference",
        "What may have disturbed the load, in words. In loads.csv joined by '; ', or none.",
        "array",
        source=lambda load: load["interference"],
        limits={},
    ),
]
