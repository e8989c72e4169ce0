"""The engine process of trtllm-serve: holds the LLM, takes requests from the link, sends back what each step made.

It ends when it is told to, or when the HTTP process is gone (the end of the link). Ctrl-C in a terminal reaches all processes;
here it is left to the HTTP process.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from trtllm_workshop.reference.serve_link import LinkBroken, Message, pack, read_frames

_PATIENCE_S = 5.0  # for an orderly end when the HTTP process is gone


class Outbox:
    """Messages on their way out. A thread of its own writes them, all that are there in one frame."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._waiting, self._news = link, deque[Message](), threading.Event()
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send soon; never waits."""
        self._waiting.append(message)
        self._news.set()

    def _write(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            messages = []
            while self._waiting:
                messages.append(self._waiting.popleft())
            try:
                if messages:
                    self._link.sendall(pack(messages))
            except OSError:
                return  # the reader sees the same end and acts on it


class Reporter:
    """Listens to one request and puts what is new into the outbox; called in the thread that ran the step."""

    def __init__(self, number: int, outbox: Outbox, tokenizer: Any, logprobs: bool) -> None:
        self._number, self._outbox, self._tokenizer = number, outbox, tokenizer
        self._logprobs, self._characters, self._tokens = logprobs, 0, 0

    def __call__(self, request: Any) -> None:
        text, tokens = request.text, len(request.token_ids)
        news: Message = {"op": "news", "id": self._number, "text": text[self._characters :], "tokens": tokens}
        if self._logprobs:
            chosen = zip(request.token_ids[self._tokens :], request.logprobs[self._tokens :], strict=False)
            news["logprobs"] = [self._entry(token, entry) for token, entry in chosen]
        self._characters, self._tokens = len(text), tokens
        if request.finished:
            news["finish_reason"], news["stop_reason"] = request.finish_reason, request.stop_reason
            if request.error is not None:
                news["error"] = str(request.error)
        elif not news["text"] and not news.get("logprobs"):
            return  # a token that completes no character
        self._outbox.put(news)

    def _entry(self, token: int, found: dict[int, Any]) -> Message:
        best = sorted(found.items(), key=lambda item: item[1].rank)
        return {
            "id": token,
            "token": self._piece(token),
            "logprob": found[token].logprob,
            "top": [[self._piece(other), value.logprob] for other, value in best],
        }

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


class Engine:
    """The LLM and its running requests."""

    def __init__(self, options: Message, outbox: Outbox) -> None:
        self.llm, self._outbox = start_engine(options), outbox
        self._running: dict[int, Any] = {}

    def submit(self, message: Message) -> None:
        """Check a request and start it; answers `accepted` or `refused` before any news."""
        from trtllm_workshop.prompts import chat_prompt_ids
        from trtllm_workshop.reference.sampling_params import SamplingParams

        number = message["id"]
        try:
            prompt = message.get("prompt_token_ids", message.get("prompt"))
            if "messages" in message:
                prompt = chat_prompt_ids(self.llm.tokenizer, message["messages"])
            params = dict(message["params"])
            if params.get("max_tokens") is None:
                params["max_tokens"] = self._room(prompt, params)
            request = self.llm.make_request(prompt, SamplingParams(**params))
        except Exception as problem:  # whatever a template or tokenizer raises for this text is about this text
            self._outbox.put({"op": "refused", "id": number, "message": plain_message(problem)})
            return
        request.listener = Reporter(number, self._outbox, self.llm.tokenizer, params.get("logprobs") is not None)
        self._outbox.put({"op": "accepted", "id": number, "prompt_tokens": len(request.prompt_token_ids)})
        self._forget_ended()
        self._running[number] = request
        try:
            self.llm.submit(request)
        except ValueError as problem:  # it can never run in this KV cache
            del self._running[number]
            self._outbox.put({"op": "refused", "id": number, "message": str(problem)})

    def _room(self, prompt: Any, params: Message) -> int:
        """What the engine's max_seq_len leaves after the prompt: how long an answer may be when nothing was said."""
        tokenizer = self.llm.tokenizer
        length = len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt or ())
        if params.get("truncate_prompt_tokens"):
            length = min(length, params["truncate_prompt_tokens"])
        return max(1, self.llm.limits["max_seq_len"] - length)

    def abort(self, number: int) -> None:
        request = self._running.pop(number, None)
        if request is not None and not request.finished:
            self.llm.abort([request])

    def answer(self, message: Message) -> None:
        value: Any = self.llm.get_stats(0) if message["what"] == "stats" else self.llm.gauges()
        self._outbox.put({"op": "answer", "id": message["id"], "value": value})

    def _forget_ended(self) -> None:
        for number in [number for number, request in self._running.items() if request.finished]:
            del self._running[number]


def plain_message(problem: BaseException) -> str:
    """The text of an error; of pydantic's, what each rule said."""
    errors = getattr(problem, "errors", None)
    if callable(errors):
        return "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in errors())
    return str(problem) or type(problem).__name__


def start_engine(options: Message) -> Any:
    """The LLM that the options of the command line ask for (`serve_cli.engine_options`)."""
    from trtllm_workshop.reference.configs import KvCacheConfig
    from trtllm_workshop.reference.llm import LLM

    given = dict(options)
    cache = KvCacheConfig(**given.pop("kv_cache_config", {}))
    template = given.pop("chat_template", None)
    llm = LLM(kv_cache_config=cache, **given)
    if template is not None and llm.tokenizer is not None:
        llm.tokenizer.chat_template = template
    return llm


def describe(engine: Engine) -> Message:
    """What the HTTP process needs to know."""
    limits = engine.llm.limits
    names = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
    return {
        **{name: limits[name] for name in names},
        "chat": bool(getattr(engine.llm.tokenizer, "chat_template", None)),
        "pid": os.getpid(),
    }


def serve(messages: queue.Queue[Message], outbox: Outbox) -> int:
    """Work off messages until `stop`; returns the exit status."""
    engine: Engine | None = None
    while True:
        message = messages.get()
        operation = message["op"]
        if operation == "stop":
            if engine is not None:
                engine.llm.shutdown()
            return 0
        if operation == "start":
            try:
                engine = Engine(message["options"], outbox)
                outbox.put({"op": "ready", **describe(engine)})
            except Exception as problem:
                outbox.put({"op": "failed", "message": str(problem) or type(problem).__name__})
        elif engine is not None:
            if operation == "submit":
                engine.submit(message)
            elif operation == "abort":
                engine.abort(message["id"])
            elif operation == "ask":
                engine.answer(message)


def read(link: socket.socket, messages: queue.Queue[Message]) -> None:
    """Pass on what arrives; at the end of the link, end this process."""
    try:
        for frame in read_frames(link):
            for message in frame:
                messages.put(message)
    except (OSError, ValueError, LinkBroken):
        pass
    messages.put({"op": "stop"})
    # An engine that is being built or loaded does not look at messages.
    timer = threading.Timer(_PATIENCE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def main(descriptor: int, arguments: Sequence[str] = ()) -> int:
    """Serve the link on an inherited file descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    messages: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=read, args=(link, messages), name="link", daemon=True).start()
    return serve(messages, Outbox(link))
