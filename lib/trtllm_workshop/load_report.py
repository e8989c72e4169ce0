"""The result of a load: its figures, what is doubtful about them, and files that say where they come from."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trtllm_workshop.load_metrics import Lengths, RequestRecord, Slo, Summary, lengths_of, throughput

_LENGTH_TOLERANCE = 0.05
_LATE_MS = 10.0
_COLUMNS = (
    "sent_s", "due_s", "ttft_s", "tpot_s", "e2e_s", "input_tokens", "output_tokens", "chunks", "token_source",
    "finish_reason", "status", "error",
)  # fmt: skip


@dataclass
class LoadResult:
    """What one load showed. Latencies are in seconds; failed requests are counted in `errors` and left out elsewhere.

    Attributes:
        config: how it was run.
        records: one for each request that was sent, in the order in which they ended (closed loop) or were due.
        slo: the limits of `goodput`, if any were given.
        client_overhead_ms: what the client needs for one request of that length when the server needs nothing; None when not
            measured.
        wall_s: seconds from the first request to the last answer, as the client's clock saw them.
    """

    config: dict[str, Any]
    records: list[RequestRecord]
    slo: Slo | None = None
    client_overhead_ms: float | None = None
    wall_s: float = 0.0
    made: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]

    @property
    def errors(self) -> int:
        """How many requests failed."""
        return len(self.records) - len(self.completed)

    @property
    def error_kinds(self) -> dict[str, int]:
        """How often each error came, the most frequent first."""
        return dict(Counter(record.error for record in self.records if record.error).most_common())

    @property
    def concurrency(self) -> int | None:
        return self.config.get("concurrency")

    @property
    def ttft(self) -> Summary:
        return Summary.of(record.ttft for record in self.completed)

    @property
    def itl(self) -> Summary:
        return Summary.of(gap for record in self.completed for gap in record.itl)

    @property
    def tpot(self) -> Summary:
        return Summary.of(record.tpot for record in self.completed)

    @property
    def e2e(self) -> Summary:
        return Summary.of(record.e2e for record in self.completed)

    @property
    def tokens_per_s_per_user(self) -> Summary:
        """1 / TPOT of each request: how fast one reader sees tokens come."""
        return Summary.of(1 / record.tpot if record.tpot else None for record in self.completed)

    @property
    def seconds(self) -> float:
        return float(throughput(self.records)["seconds"])

    @property
    def requests_per_s(self) -> float | None:
        return throughput(self.records)["requests_per_s"]

    @property
    def output_tokens_per_s(self) -> float | None:
        return throughput(self.records)["output_tokens_per_s"]

    @property
    def total_tokens_per_s(self) -> float | None:
        return throughput(self.records)["total_tokens_per_s"]

    @property
    def input_tokens(self) -> float | None:
        """Mean prompt length in tokens, as counted by the server (or the tokenizer)."""
        counts = [record.input_tokens for record in self.completed if record.input_tokens is not None]
        return statistics.fmean(counts) if counts else None

    @property
    def output_tokens(self) -> Lengths | None:
        """Asked and real answer lengths."""
        return lengths_of(self.records)

    @property
    def tokens_per_chunk(self) -> float | None:
        """Output tokens per piece of text that arrived; 1 when each token comes alone."""
        values = [record.tokens_per_chunk for record in self.completed if record.tokens_per_chunk]
        return statistics.fmean(values) if values else None

    @property
    def token_source(self) -> str:
        """Who counted the tokens: `usage`, `tokenizer`, `mixed` or `none`."""
        sources = {record.token_source for record in self.completed}
        return sources.pop() if len(sources) == 1 else "mixed" if sources else "none"

    @property
    def goodput(self) -> float | None:
        """Completed requests a second that kept every limit of the SLO; None without an SLO or without requests."""
        rate = self.requests_per_s
        if self.slo is None or rate is None:
            return None
        return rate * sum(map(self.slo.kept_by, self.records)) / len(self.completed)

    @property
    def late_ms(self) -> float | None:
        """Median milliseconds between when a request was due and when it was sent; None in a closed loop."""
        late = [record.sent - record.due for record in self.records if record.due is not None]
        return statistics.median(late) * 1e3 if late else None

    @property
    def warnings(self) -> list[str]:
        """What makes the figures doubtful, in sentences."""
        found = []
        if self.errors:
            kinds = "; ".join(f"{count} times {kind}" for kind, count in list(self.error_kinds.items())[:3])
            found.append(f"{self.errors} of {len(self.records)} requests failed ({kinds})")
        lengths = self.output_tokens
        if lengths and lengths.off > _LENGTH_TOLERANCE:
            found.append(
                f"answers have {lengths.mean:.1f} tokens on average ({lengths.min} to {lengths.max}), asked were "
                f"{lengths.asked:.0f}: not comparable with runs of another length. Does the server know ignore_eos?"
            )
        if self.completed and self.token_source != "usage":
            found.append(f"tokens were not counted by the server (source: {self.token_source})")
        if self.completed and not self.ttft.count:
            found.append("no answer held any text: there is no time to the first token")
        late = self.late_ms
        if late is not None and late > _LATE_MS:
            found.append(f"requests were sent {late:.0f} ms late (median): the client could not keep the rate")
        overhead, fastest = self.client_overhead_ms, self.e2e.min
        if overhead is not None and fastest and overhead > 50 * fastest:  # ms against 5 % of seconds
            found.append(f"the client itself needs {overhead:.1f} ms a request, more than 5 % of the fastest one")
        return found

    def to_json(self) -> dict[str, Any]:
        """All figures with configuration, machine, versions and the time it was made; plain data."""
        figures: dict[str, Any] = {
            name: {key: value for key, value in asdict(getattr(self, name)).items() if value is not None}
            for name in ("ttft", "itl", "tpot", "e2e", "tokens_per_s_per_user")
        }
        lengths = self.output_tokens
        return {
            "made": self.made,
            "config": self.config,
            **{f"{name}_s" if name != "tokens_per_s_per_user" else name: value for name, value in figures.items()},
            **throughput(self.records),
            "completed": len(self.completed),
            "errors": self.errors,
            "error_kinds": self.error_kinds,
            "input_tokens": self.input_tokens,
            "output_tokens": asdict(lengths) if lengths else None,
            "token_source": self.token_source,
            "tokens_per_chunk": self.tokens_per_chunk,
            "slo": asdict(self.slo) if self.slo else None,
            "goodput": self.goodput,
            "client_overhead_ms": self.client_overhead_ms,
            "late_ms": self.late_ms,
            "warnings": self.warnings,
            "machine": client_machine(),
            "versions": versions(),
        }

    def csv_text(self) -> str:
        """One row a request; times in seconds, `sent_s` and `due_s` from the first request on."""
        start = min((record.sent for record in self.records), default=0.0)
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for r in sorted(self.records, key=lambda record: record.sent):
            due = None if r.due is None else r.due - start
            times = [
                None if value is None else f"{value:.6f}" for value in (r.sent - start, due, r.ttft, r.tpot, r.e2e)
            ]
            counts = [r.input_tokens, r.output_tokens, len(r.chunk_times)]
            writer.writerow([*times, *counts, r.token_source, r.finish_reason, r.status, r.error])
        return out.getvalue()

    def save(self, folder: str | Path, name: str = "load") -> Path:
        """Write NAME.json and NAME.csv into `folder`, each whole or not at all; returns the JSON file."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        texts = {f"{name}.json": json.dumps(self.to_json(), indent=1) + "\n", f"{name}.csv": self.csv_text()}
        for file, text in texts.items():
            temporary = target / f".{file}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target / file)
        return target / f"{name}.json"

    def __str__(self) -> str:
        return table([self])


def table(results: Sequence[LoadResult]) -> str:
    """A plain-text table, one row a load; a figure that was not measured is a dash, never a zero."""
    header = [
        "load",
        "done",
        "failed",
        "TTFT p50 ms",
        "ITL p50 ms",
        "TPOT mean ms",
        "E2E p50 s",
        "output tokens/s",
        "requests/s",
    ]
    rows = [header]
    for result in results:
        config = result.config
        load = (
            f"{config['concurrency']} in flight"
            if config.get("concurrency")
            else f"{config['rate']:g}/s"
            if config.get("rate")
            else "trace"
        )
        ms = [result.ttft.p50, result.itl.p50, result.tpot.mean]
        figures = [None if value is None else f"{value * 1e3:.1f}" for value in ms]
        figures.append(None if result.e2e.p50 is None else f"{result.e2e.p50:.2f}")
        rates = [result.output_tokens_per_s, result.requests_per_s]
        figures += [None if value is None else f"{value:.2f}" for value in rates]
        counts = [str(len(result.completed)), str(result.errors)]
        rows.append([load, *counts, *(figure or "-" for figure in figures)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def client_machine() -> dict[str, Any]:
    """The machine that the client runs on."""
    return {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()}


def versions() -> dict[str, str]:
    """Python and the packages that take part in measuring."""
    found = {"python": platform.python_version()}
    for name in ("trtllm-workshop", "aiohttp", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
